"""Sequence parallelism by Ulysses (Jacobs et al. 2023, arXiv:2309.14509): ranks share each row of packed tokens.

Each rank has a slice of the tokens, with which all layers but attention work as they are. For attention the ranks
exchange slices of all heads for all tokens of some heads, and back. Key heads that are fewer than ranks are repeated.

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
    """The ranks that share a row of tokens."""

    group: dist.ProcessGroup
    """Their process group."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    def span(self, tokens: int) -> tuple[int, int]:
        """First and last (exclusive) token of this rank; the last rank's may lie beyond the end, in padding."""
        each = -(-tokens // self.size)
        first = dist.get_rank(self.group) * each
        return first, first + each

    def sum(self, part: Tensor) -> Tensor:
        """The sum of what each rank has; differentiable where every rank computes the same from it."""
        total: Tensor = _Sum.apply(part, self.group)
        return total

    def max(self, part: Tensor) -> Tensor:
        """The largest of what each rank has; of integers, without gradients."""
        largest = part.to(torch.int32)  # int16 has no exchange
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest.to(part.dtype)


@dataclass(frozen=True)
class Shared:
    """A layout of tokens of which each rank has a slice."""

    whole: AttentionLayout
    tokens: int
    """Without padding."""
    ranks: SequenceRanks

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionLayout.attend`; Q is S."""
        copies = copies_of_keys(query.shape[HEADS], key.shape[HEADS], self.ranks.size)
        key, value = (x.repeat_interleave(copies, HEADS) if copies > 1 else x for x in (key, value))
        query, key, value = (_exchanged(x, HEADS, TOKENS, self.ranks)[:, :, : self.tokens] for x in (query, key, value))
        attended = self.whole.attend(query, key, value, spec)
        first, last = self.ranks.span(self.tokens)
        padding = (last - first) * self.ranks.size - self.tokens
        return _exchanged(F.pad(attended, (0, 0, 0, padding)), TOKENS, HEADS, self.ranks)


def copies_of_keys(heads: int, key_heads: int, ranks: int) -> int:
    """Repeats of each key head, so that every rank gets those that its query heads look at.

    Raises:
        ValueError: the query heads cannot be split among the ranks.
    """
    if heads % ranks:
        raise ValueError(f"{heads} attention heads cannot be split among {ranks} devices")
    groups = heads // key_heads
    return next(n for n in range(1, groups + 1) if groups % n == 0 and key_heads * n % ranks == 0)


def _exchanged(x: Tensor, scattered: int, gathered: int, ranks: SequenceRanks) -> Tensor:
    """Give each rank its part of one dimension, and get from each its part of another; differentiable."""
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
    def forward(ctx: AutogradContext, part: Tensor, group: Any) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None  # every rank has the whole gradient of the sum, and its part of the sum alone
