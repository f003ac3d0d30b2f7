"""The global random generators of a process. Results of tether do not depend on them, but user code may use them."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tether.types import StateDict

_lock = threading.RLock()


@contextmanager
def python_seeded(seed: str) -> Iterator[None]:
    """Seed Python's global generator for a block, then restore it; `rng_state` in another thread waits for the end."""
    with _lock:
        state = random.getstate()
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)


def seed_rng(seed: int) -> None:
    """Seed the global generators of Python, numpy and, if it is imported, torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch := _torch():
        torch.manual_seed(seed)


def rng_state() -> StateDict:
    """Return the state of the global generators, as tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    with _lock:
        python = random.getstate()
    state: StateDict = {
        "python": python,
        "numpy": (kind, np.asarray(keys).tolist(), position, has_gauss, gauss),
    }
    if torch := _torch():
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():  # a forked process cannot use CUDA, and has no CUDA state
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: StateDict) -> None:
    """Restore the state that `rng_state` returned."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.asarray(keys).astype(np.uint32), position, has_gauss, gauss))
    if "torch" in state and (torch := _torch()):
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_initialized() and "cuda" in state:
            torch.cuda.set_rng_state_all(state["cuda"])


def _torch() -> Any:
    """Return torch if it is imported; environment processes do not import it."""
    return sys.modules.get("torch")
