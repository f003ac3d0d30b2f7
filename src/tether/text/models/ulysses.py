"""Sequence parallelism with Ulysses (Jacobs et al. 2023, arXiv:2309.14509): ranks split each row of packed tokens.

Each rank has a slice of the tokens, on which all layers except attention work unchanged. For attention, the ranks
exchange slices, so that each has all tokens of some heads, and exchange them back afterwards. If there are fewer key
heads than ranks, they are repeated.

Legend: N tokens, S of them on a rank (N / ranks, rounded up), H query heads, K key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tether.kernels import AttentionLayout, AttentionSpec
from tether.types import AutogradContext

HEADS, TOKENS = 1, 2  # dimensions of [1, H, N, D]


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that split a row of tokens."""

    group: dist.ProcessGroup
    """Process group of the ranks."""

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def span(self, tokens: int) -> tuple[int, int]:
        """Return start and end of this rank's tokens; those of the last rank may extend into padding."""
        each = -(-tokens // self.size)
        first = dist.get_rank(self.group) * each
        return first, first + each

    def sum(self, local: Tensor) -> Tensor:
        """Return the sum over ranks; differentiable if every rank then computes the same from it."""
        total: Tensor = _Sum.apply(local, self.group)
        return total

    def max(self, local: Tensor) -> Tensor:
        """Return the maximum over ranks, for integers, without gradients."""
        largest = local.to(torch.int32)  # int16 is not supported
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest.to(local.dtype)


@dataclass(frozen=True)
class Shared:
    """A layout of tokens that are split over ranks."""

    layout: AttentionLayout
    tokens: int
    """Number of tokens without padding."""
    ranks: SequenceRanks

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        copies = copies_of_keys(query.shape[HEADS], key.shape[HEADS], self.ranks.size)
        key, value = (x.repeat_interleave(copies, HEADS) if copies > 1 else x for x in (key, value))
        query, key, value = (_exchanged(x, HEADS, TOKENS, self.ranks)[:, :, : self.tokens] for x in (query, key, value))
        attended = self.layout.attend(query, key, value, spec)
        first, last = self.ranks.span(self.tokens)
        padding = (last - first) * self.ranks.size - self.tokens
        return _exchanged(F.pad(attended, (0, 0, 0, padding)), TOKENS, HEADS, self.ranks)


def copies_of_keys(heads: int, key_heads: int, ranks: int) -> int:
    """Return how often each key head is repeated, so that every rank has the key heads of its query heads.

    Raises:
        ValueError: the query heads cannot be split over the ranks.
    """
    if heads % ranks:
        raise ValueError(f"{heads} attention heads cannot be split among {ranks} devices")
    groups = heads // key_heads
    return next(n for n in range(1, groups + 1) if groups % n == 0 and key_heads * n % ranks == 0)


def _exchanged(x: Tensor, scattered: int, gathered: int, ranks: SequenceRanks) -> Tensor:
    """Scatter one dimension over the ranks and gather another one; differentiable."""
    exchanged: Tensor = _Exchange.apply(x, scattered, gathered, ranks)
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, scattered: int, gathered: int, ranks: SequenceRanks) -> Tensor:
        ctx.back = gathered, scattered, ranks
        return _exchange(x, scattered, gathered, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, *ctx.back), None, None, None


def _exchange(x: Tensor, scattered: int, gathered: int, ranks: SequenceRanks) -> Tensor:
    sent = torch.stack(x.chunk(ranks.size, scattered))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    return torch.cat(received.unbind(), gathered)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, local: Tensor, group: Any) -> Tensor:
        total = local.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None  # every rank has the full gradient of the sum, which is that of its own term
