"""How Megatron's tensor-parallel ranks split transformers' tensors: reads shards, and joins them.

A shard is read as slices of the file, so that no rank loads more than its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Slices(Protocol):
    """A tensor in a file that can be read in slices (safetensors' ``get_slice``)."""

    def __getitem__(self, index: tuple[slice, ...] | slice) -> Tensor:
        """Read a slice."""
        ...

    def get_shape(self) -> list[int]:
        """Return the shape of the full tensor."""
        ...


class Split(Protocol):
    """Maps one or several tensors of transformers to the shards of one tensor of Megatron."""

    def read(self, tensors: Sequence[Slices], rank: int, ranks: int) -> Tensor:
        """Return the shard of a rank."""
        ...

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return transformers' tensors from the shards of all ranks in order."""
        ...


@dataclass(frozen=True)
class Replicated:
    """Each rank has the full tensor, or several full tensors with their rows stacked."""

    count: int = 1

    def read(self, tensors: Sequence[Slices], rank: int, ranks: int) -> Tensor:
        return tensors[0][:] if self.count == 1 else torch.cat([tensor[:] for tensor in tensors])

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return list(shards[0].chunk(self.count)) if self.count > 1 else [shards[0]]


@dataclass(frozen=True)
class RowSplit:
    """Rows are split: outputs of a linear layer, or entries of the vocabulary."""

    def read(self, tensors: Sequence[Slices], rank: int, ranks: int) -> Tensor:
        return tensors[0][_span(tensors[0].get_shape()[0], rank, ranks)]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards))]


@dataclass(frozen=True)
class ColumnSplit:
    """Columns are split: inputs of a linear layer."""

    def read(self, tensors: Sequence[Slices], rank: int, ranks: int) -> Tensor:
        return tensors[0][:, _span(tensors[0].get_shape()[1], rank, ranks)]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards), dim=1)]


@dataclass(frozen=True)
class GateUp:
    """Each rank has its rows of the gate above its rows of the up projection."""

    def read(self, tensors: Sequence[Slices], rank: int, ranks: int) -> Tensor:
        return torch.cat([tensor[_span(tensor.get_shape()[0], rank, ranks)] for tensor in tensors])

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(halves)) for halves in zip(*(shard.chunk(2) for shard in shards), strict=True)]


@dataclass(frozen=True)
class QueryKeyValue:
    """For each key head, the query heads that share it are followed by the key head and its value head.

    Ranks get equal shares. With fewer key heads than ranks, several ranks split the group of one key head.
    """

    heads: int
    key_heads: int

    def read(self, tensors: Sequence[Slices], rank: int, ranks: int) -> Tensor:
        first, last = rank * self.key_heads // ranks, -(-(rank + 1) * self.key_heads // ranks)
        groups = []
        for tensor in tensors:
            rows = tensor.get_shape()[0] // self.key_heads
            groups.append(tensor[slice(first * rows, last * rows)].unflatten(0, (last - first, rows)))
        merged = torch.cat(groups, dim=1).flatten(0, 1)
        ranks_per_head = ranks // self.key_heads if ranks > self.key_heads else 1
        return merged.chunk(ranks_per_head)[rank % ranks_per_head]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        merged = torch.cat(list(shards)).unflatten(0, (self.key_heads, -1))
        per_group = self.heads // self.key_heads
        size = merged.shape[1] // (per_group + 2)
        return [x.flatten(0, 1) for x in merged.split([per_group * size, size, size], dim=1)]


def _span(size: int, rank: int, ranks: int) -> slice:
    each = size // ranks
    return slice(rank * each, (rank + 1) * each)
