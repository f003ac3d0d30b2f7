"""The global random generators of a process. No result of tether depends on them, but user code draws from them."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

from tether.types import StateDict


def seed_rng(seed: int) -> None:
    """Start the global generators of Python, numpy and, where it is imported, torch from a seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch := _torch():
        torch.manual_seed(seed)


def rng_state() -> StateDict:
    """State of the global generators, as tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: StateDict = {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), position, has_gauss, gauss),
    }
    if torch := _torch():
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():  # a forked process of environments never can, and never draws there
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: StateDict) -> None:
    """Take over what `rng_state` gave."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.asarray(keys).astype(np.uint32), position, has_gauss, gauss))
    if "torch" in state and (torch := _torch()):
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_initialized() and "cuda" in state:
            torch.cuda.set_rng_state_all(state["cuda"])


def _torch() -> Any:
    """torch, where anything in this process can have drawn from it: the processes of environments start without."""
    return sys.modules.get("torch")
