"""Context parallelism: each sequence is split over ranks, and each rank attends over the keys of all ranks.

A causal query attends to more keys the later it is in a sequence. So a sequence is split into twice as many chunks as
there are ranks, and rank r has the chunks r and 2 C - 1 - r: an early and a late one (the zig-zag of Llama 3, arXiv
2407.21783, section 3.3.2). Keys and values are gathered, and their gradients are summed on the rank that owns them.

Legend: N = tokens of all ranks, n = tokens of a rank, C = ranks, H = query heads, K = key/value heads, D = head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right

from tether.kernels import AttentionSpec, masked_attention, visible_keys
from tether.text.models.layers import Packed

Chunk = tuple[int, int, int]
"""(segment, start, end) of a chunk."""


@dataclass(frozen=True)
class ZigZag:
    """An attention layout (`tether.kernels.AttentionLayout`) for one rank's tokens of packed sequences."""

    packed: Packed
    """The packed tokens of all ranks."""
    rank: int
    ranks: int
    group: Any

    @cached_property
    def indices(self) -> Tensor:
        """[n] indices of this rank's tokens among all."""
        return _token_indices(self.packed.lengths, self.rank, self.ranks)

    @cached_property
    def _order(self) -> tuple[Tensor, int]:
        """[N] index of each token in the gathered tensor, where ranks are padded to the same length; and this
        length."""
        by_rank = [_token_indices(self.packed.lengths, rank, self.ranks) for rank in range(self.ranks)]
        width = max(map(len, by_rank))
        order = torch.empty(sum(self.packed.lengths), dtype=torch.int64)
        for rank, indices in enumerate(by_rank):
            order[indices] = rank * width + torch.arange(len(indices))
        return order, width

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Return [1, H, n, D] for query [1, H, n, D], key and value [1, K, n, D] of this rank's tokens."""
        order, width = self._order
        keys, values = (_Gather.apply(x.movedim(2, 0), order.to(x.device), width, self.group) for x in (key, value))
        prefixes = self.packed.prefixes or (None,) * len(self.packed.lengths)
        starts = list(itertools.accumulate(self.packed.lengths, initial=0))
        attended, done = [], 0
        for segment, first, last in _chunks(self.packed.lengths, self.rank, self.ranks):
            spans = [slice(starts[segment], starts[segment] + last)]
            prefix = prefixes[segment]
            if prefix is not None:
                spans.insert(0, slice(starts[prefix], starts[prefix] + self.packed.lengths[prefix]))
            seen = [torch.cat([x[span] for span in spans]).movedim(0, 2) for x in (keys, values)]
            chunk = query[:, :, done : done + last - first]
            attended.append(_lower_right(chunk, seen[0], seen[1], spec))
            done += last - first
        if attended:
            return torch.cat(attended, dim=2)
        # This rank has no tokens, but the gradients of keys and values still have to be exchanged.
        return query[..., : value.shape[-1]] + 0.0 * (keys.sum() + values.sum())


@dataclass(frozen=True)
class Filled:
    """A layout with padding tokens after those of another layout; the padding attends to nothing."""

    layout: Any
    tokens: int
    """Number of tokens of the wrapped layout."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        missing = query.shape[2] - self.tokens
        inside = (x[:, :, : self.tokens] for x in (query, key, value))
        return F.pad(self.layout.attend(*inside, spec), (0, 0, 0, missing))


def _chunks(lengths: Sequence[int], rank: int, ranks: int) -> list[Chunk]:
    """Return the non-empty chunks of a rank, in the order of its tokens."""
    chunks = []
    for segment, length in enumerate(lengths):
        each = -(-length // (2 * ranks))
        for index in (rank, 2 * ranks - 1 - rank):
            first, last = min(index * each, length), min((index + 1) * each, length)
            if first < last:
                chunks.append((segment, first, last))
    return chunks


def _token_indices(lengths: Sequence[int], rank: int, ranks: int) -> Tensor:
    starts = list(itertools.accumulate(lengths, initial=0))
    spans = [torch.arange(starts[s] + first, starts[s] + last) for s, first, last in _chunks(lengths, rank, ranks)]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def _lower_right(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Attend with queries [1, H, Q, D] to keys [1, K, L, D]; the last query sees all keys, each earlier one a key
    less."""
    queries, keys = query.shape[2], key.shape[2]
    if spec.softcap is None and (spec.sliding_window is None or spec.sliding_window >= keys):
        mask: Any = causal_lower_right(queries, keys)
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=spec.scale, enable_gqa=grouped)
    position = torch.arange(keys, device=query.device)
    return masked_attention(query, key, value, visible_keys(position[keys - queries :], position, spec), spec)


class _Gather(torch.autograd.Function):
    """Gathers the [n, ...] of all ranks to [N, ...] in the order of the packed tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, width: int, group: Any) -> Tensor:
        ctx.save_for_backward(order)
        ctx.tokens, ctx.width, ctx.group = len(x), width, group
        ranks = dist.get_world_size(group)
        padded = x.new_zeros(width, *x.shape[1:])
        padded[: len(x)] = x
        gathered = x.new_empty(ranks * width, *x.shape[1:])
        dist.all_gather_into_tensor(gathered, padded, group=group)
        return gathered[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        ranks = dist.get_world_size(ctx.group)
        scattered = grad.new_zeros(ranks * ctx.width, *grad.shape[1:])
        scattered[order] = grad
        of_rank = grad.new_empty(ctx.width, *grad.shape[1:])
        dist.reduce_scatter_tensor(of_rank, scattered, group=ctx.group)
        return of_rank[: ctx.tokens], None, None, None
