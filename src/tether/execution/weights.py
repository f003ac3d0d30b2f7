"""Weights in an object store, where all processes of a machine look at the same memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tether.batch import WeightUpdate

PART = 64 << 20
"""Bytes of weights that travel at a time: one part is stored while another is read, in memory that was used before."""


@dataclass(frozen=True)
class StoredWeights:
    """Tensors as bytes of NumPy, which Ray reads without a copy; each is stored once, whatever its names."""

    names: tuple[tuple[str, int], ...]
    """Name of a tensor, and which of the arrays it is."""
    arrays: tuple[np.ndarray[Any, np.dtype[np.uint8]], ...]
    formats: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    """Of each array."""

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> StoredWeights:
        """Weights in the memory of the host."""
        places, arrays = dict[tuple[int, torch.Size], int](), list[Any]()
        names, formats = [], []
        kept = list(tensors)  # or memory would be used again, and two tensors seem to be one
        for name, tensor in kept:
            key = (tensor.data_ptr(), tensor.shape)
            if key not in places:
                places[key] = len(arrays)
                arrays.append(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
                formats.append((tensor.dtype, tuple(tensor.shape)))
            names.append((name, places[key]))
        return cls(tuple(names), tuple(arrays), tuple(formats))

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def update(self, version: int) -> WeightUpdate:
        """The weights, to be copied from: the memory may be that of others, and is only read."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            tensors = [
                torch.from_numpy(array).view(dtype).view(shape)
                for array, (dtype, shape) in zip(self.arrays, self.formats, strict=True)
            ]
        return WeightUpdate(version, [(name, tensors[place]) for name, place in self.names])


def in_parts(
    tensors: Iterable[tuple[str, Tensor]], limit: int = PART
) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Tensors, some at a time, and whether there are more.

    Args:
        tensors: name and value; other names of a tensor follow its first, and are in the same part.
        limit: bytes of a part; its last tensor may exceed it.
    """
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, value in tensors:
        again = bool(part) and value is part[-1][1]
        if size >= limit and not again:
            yield part, True
            part, size = [], 0
        part.append((name, value))
        size += 0 if again else value.nbytes
    yield part, False
