"""Weights in an object store, in memory that all processes of a machine share."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tether.batch import WeightUpdate

CHUNK_BYTES = 64 << 20
"""Bytes of weights in a chunk: one chunk is stored while the previous one is read, and memory is reused."""


@dataclass(frozen=True)
class StoredWeights:
    """Tensors as NumPy bytes, which Ray reads without a copy; a tensor with several names is stored once."""

    names: tuple[tuple[str, int], ...]
    """Names of tensors with the index of their array."""
    arrays: tuple[np.ndarray[Any, np.dtype[np.uint8]], ...]
    formats: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    """Dtype and shape of each array."""

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> StoredWeights:
        """Pack tensors into host memory."""
        indices, arrays = dict[tuple[int, torch.Size], int](), list[Any]()
        names, formats = [], []
        items = list(tensors)  # keeps all alive: with reused memory two tensors would have one address
        for name, tensor in items:
            key = (tensor.data_ptr(), tensor.shape)
            if key not in indices:
                indices[key] = len(arrays)
                arrays.append(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
                formats.append((tensor.dtype, tuple(tensor.shape)))
            names.append((name, indices[key]))
        return cls(tuple(names), tuple(arrays), tuple(formats))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def update(self, version: int) -> WeightUpdate:
        """Return the weights for copying: the memory may be shared and must not be written to."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            tensors = [
                torch.from_numpy(array).view(dtype).view(shape)
                for array, (dtype, shape) in zip(self.arrays, self.formats, strict=True)
            ]
        return WeightUpdate(version, [(name, tensors[index]) for name, index in self.names])


def weight_chunks(
    tensors: Iterable[tuple[str, Tensor]], limit: int = CHUNK_BYTES
) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Yield the tensors in chunks, each with whether another one follows.

    Args:
        tensors: names and values; further names of a tensor directly follow the first, and stay in its chunk.
        limit: bytes of a chunk; its last tensor may exceed it.
    """
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, value in tensors:
        is_alias = bool(chunk) and value is chunk[-1][1]
        if size >= limit and not is_alias:
            yield chunk, True
            chunk, size = [], 0
        chunk.append((name, value))
        size += 0 if is_alias else value.nbytes
    yield chunk, False
