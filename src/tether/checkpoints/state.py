"""Training states as files: trees of tensors and plain values; optimizer moments may be in separate files next to
them."""

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
    """Return a state as the content of a file written by `save_state`."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def save_state(path: Path, state: Mapping[str, object]) -> None:
    """Save a tree of tensors, numbers, strings, tuples, lists and dicts; `load_state` returns it bit for bit."""
    # Open it here: given a path, torch would keep the file and its space open after a full disk.
    with path.open("wb") as file:
        torch.save(dict(state), file)


def save_moments(path: Path, moments: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Save optimizer tensors of some weights, as index of the weight -> name -> tensor."""
    named = {f"{index}.{name}": value for index, tensors in moments.items() for name, value in tensors.items()}
    save_file(named, path)


def moments_path(path: Path, number: int, of: int) -> Path:
    """Return the path of shard `number`, counted from 1, of the optimizer moments of the state at `path`, where
    `load_state` looks for it."""
    return path.with_name(f"{path.stem}-{number:05}-of-{of:05}.safetensors")


def load_state(path: Path, *, mapped: bool = False) -> StateDict:
    """Load a state written by `save_state`, and moments in files next to it, onto the CPU without executing code.

    Args:
        path: path of the state.
        mapped: whether to map the file into memory and read tensors on use, for callers that need slices of them.

    Raises:
        ValueError: the file is not such a state.
    """
    with reading(path, ANOTHER_CHECKPOINT):
        state: StateDict = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        if not isinstance(state, dict):
            raise ValueError(f"{path}: not a training state, but a {type(state).__name__}. {ANOTHER_CHECKPOINT}")
    for shard in sorted(path.parent.glob(f"{path.stem}-*-of-*.safetensors")):
        with reading(shard, ANOTHER_CHECKPOINT), safe_open(shard, "pt") as file:
            for key in file.keys():  # noqa: SIM118  it is no mapping
                number, name = key.split(".", 1)
                state["state"].setdefault(int(number), {})[name] = file.get_tensor(key)
    return state
