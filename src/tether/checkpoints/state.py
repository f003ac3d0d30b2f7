"""Training states as files: trees of tensors and plain values; moments of an optimizer also in parts beside them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tether.runtime.disk import ANOTHER_CHECKPOINT, reading
from tether.types import StateDict


def as_bytes(state: Mapping[str, object]) -> bytes:
    """The contents of a file of `save_state`."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def save_state(path: Path, state: Mapping[str, object]) -> None:
    """Store a tree of tensors, numbers, strings, tuples, lists and dicts so that it loads back bit for bit."""
    with path.open("wb") as file:  # not by name: torch would hold the file, and its space, open after a full disk
        torch.save(dict(state), file)


def save_moments(path: Path, moments: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Store tensors of some of the weights of an optimizer: number of the weight -> name -> tensor."""
    named = {f"{number}.{name}": value for number, kept in moments.items() for name, value in kept.items()}
    save_file(named, path)


def moments_beside(path: Path, number: int, of: int) -> Path:
    """Where `load_state` looks for a part of the moments of the state at `path`; numbers begin at 1."""
    return path.with_name(f"{path.stem}-{number:05}-of-{of:05}.safetensors")


def load_state(path: Path, *, mapped: bool = False) -> StateDict:
    """Load what `save_state` stored, with the moments that are beside it, onto the CPU; nothing in it is executed.

    Args:
        path: of the state.
        mapped: tensors are read from the file when they are used; for those who need parts of them.

    Raises:
        ValueError: the file holds anything else.
    """
    with reading(path, ANOTHER_CHECKPOINT):
        state: StateDict = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        if not isinstance(state, dict):
            raise ValueError(f"{path}: not a training state, but a {type(state).__name__}. {ANOTHER_CHECKPOINT}")
    for part in sorted(path.parent.glob(f"{path.stem}-*-of-*.safetensors")):
        with reading(part, ANOTHER_CHECKPOINT), safe_open(part, "pt") as file:
            for key in file.keys():  # noqa: SIM118  it is no mapping
                number, name = key.split(".", 1)
                state["state"].setdefault(int(number), {})[name] = file.get_tensor(key)
    return state
