"""How Megatron's tensor-parallel ranks hold the tensors of transformers: read a rank's part, join the parts again.

A part is read as slices of the file, so that no rank ever holds more than it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Slices(Protocol):
    """A tensor in a file, of which parts can be read (safetensors' ``get_slice``)."""

    def __getitem__(self, index: tuple[slice, ...] | slice) -> Tensor:
        """Read a part."""
        ...

    def get_shape(self) -> list[int]:
        """The shape of the whole."""
        ...


class Split(Protocol):
    """Between tensors of transformers and the one of Megatron that holds them."""

    def read(self, tensors: Sequence[Slices], rank: int, ranks: int) -> Tensor:
        """The part of a rank."""
        ...

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of transformers, from the parts of all ranks in their order."""
        ...


@dataclass(frozen=True)
class Whole:
    """The same on each rank."""

    def read(self, tensors: Sequence[Slices], rank: int, ranks: int) -> Tensor:
        """See `Split`."""
        return tensors[0][:]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """See `Split`."""
        return [parts[0]]


@dataclass(frozen=True)
class Rows:
    """Outputs of a linear layer, or rows of the vocabulary, are split."""

    def read(self, tensors: Sequence[Slices], rank: int, ranks: int) -> Tensor:
        """See `Split`."""
        return tensors[0][_span(tensors[0].get_shape()[0], rank, ranks)]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """See `Split`."""
        return [torch.cat(list(parts))]


@dataclass(frozen=True)
class Columns:
    """Inputs of a linear layer are split."""

    def read(self, tensors: Sequence[Slices], rank: int, ranks: int) -> Tensor:
        """See `Split`."""
        return tensors[0][:, _span(tensors[0].get_shape()[1], rank, ranks)]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """See `Split`."""
        return [torch.cat(list(parts), dim=1)]


@dataclass(frozen=True)
class GateUp:
    """Each rank holds its rows of the gate, and below them its rows of the up projection."""

    def read(self, tensors: Sequence[Slices], rank: int, ranks: int) -> Tensor:
        """See `Split`."""
        return torch.cat([tensor[_span(tensor.get_shape()[0], rank, ranks)] for tensor in tensors])

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """See `Split`."""
        return [torch.cat(list(halves)) for halves in zip(*(part.chunk(2) for part in parts), strict=True)]


@dataclass(frozen=True)
class QueryKeyValue:
    """Each key head follows the query heads that share it, and its value head follows it; ranks hold equal parts.

    With fewer key heads than ranks several ranks share what belongs to one.
    """

    heads: int
    key_heads: int

    def read(self, tensors: Sequence[Slices], rank: int, ranks: int) -> Tensor:
        """See `Split`."""
        first, last = rank * self.key_heads // ranks, -(-(rank + 1) * self.key_heads // ranks)
        groups = []
        for tensor in tensors:
            rows = tensor.get_shape()[0] // self.key_heads
            groups.append(tensor[slice(first * rows, last * rows)].unflatten(0, (last - first, rows)))
        merged = torch.cat(groups, dim=1).flatten(0, 1)
        within = ranks // self.key_heads if ranks > self.key_heads else 1
        return merged.chunk(within)[rank % within]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """See `Split`."""
        merged = torch.cat(list(parts)).unflatten(0, (self.key_heads, -1))
        per_group = self.heads // self.key_heads
        size = merged.shape[1] // (per_group + 2)
        return [x.flatten(0, 1) for x in merged.split([per_group * size, size, size], dim=1)]


def _span(size: int, rank: int, ranks: int) -> slice:
    each = size // ranks
    return slice(rank * each, (rank + 1) * each)
