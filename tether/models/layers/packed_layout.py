"""Packed tokens and the padded batches that attention runs on: how they go from one to the other, and back.

Sequences of like length run together as a padded batch, since one kernel call each would cost more than the padding;
and a prompt that several responses continue stands once among the packed tokens, but in each of their sequences::

    tokens     [ p0 p1 | a0 a1 | b0 ]          a prompt of two tokens and its two responses
    sequences    p0 p1   a0 a1                 one batch of two rows; padding repeats a sequence's last token,
                 p0 p1   b0 (b0)               and stands where no causal query looks

PyTorch's own gradient of an indexed tensor adds up one number at a time, and in fp32 in no fixed order. These add up
whole rows, in fp32 and in the order of the sequences.

Legend: N = tokens, P = places in all batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LIKE_LENGTH = 0.75
"""A sequence joins a batch while it is at least this share as long as the batch's longest."""


@dataclass(frozen=True)
class Places:
    """Where each token stands; made by `places_of`."""

    token: Tensor  # [P] the token that stands at a place
    first: Tensor  # [N] the first place of a token
    unread: Tensor  # [P] bool: this place is not a token's first, so its attention output is not used
    repeats: tuple[tuple[Tensor, Tensor], ...]
    """Tokens and their second places, then tokens and their third places, and so on; padding is none."""
    shapes: tuple[tuple[int, int], ...]
    """Rows and width of each batch."""

    def spread(self, per_token: Tensor) -> Tensor:
        """[N, ..] -> [P, ..]; the gradient of a token is the sum over its places."""
        spread: Tensor = _Spread.apply(per_token, self)
        return spread

    def collect(self, per_place: Tensor) -> Tensor:
        """[P, ..] -> [N, ..], from the first place of each token."""
        collected: Tensor = _Collect.apply(per_place, self)
        return collected

    def batches(self, per_place: Tensor) -> list[Tensor]:
        """[P, ..] -> one [rows, width, ..] for each batch."""
        pieces = per_place.split([rows * width for rows, width in self.shapes])
        return [piece.unflatten(0, shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


@lru_cache(maxsize=8)  # every layer of a forward and of its backward asks for the same
def places_of(lengths: tuple[int, ...], after: tuple[int | None, ...] | None, device: torch.device) -> Places:
    """Place the sequences that `Packed(lengths, after)` describes."""
    starts = list(itertools.accumulate(lengths, initial=0))
    spans = [torch.arange(start, stop) for start, stop in itertools.pairwise(starts)]
    if after is None:
        sequences = spans
    else:
        continued = set(after)
        chains = [(prior, piece) for piece, prior in enumerate(after) if piece not in continued]
        sequences = [
            spans[piece] if prior is None else torch.cat([spans[prior], spans[piece]]) for prior, piece in chains
        ]
    tokens, real, shapes = [], [], []
    for group in _alike(sequences):
        width = len(group[0])
        shapes.append((len(group), width))
        for sequence in group:
            tokens.append(sequence[torch.arange(width).clamp(max=len(sequence) - 1)])
            real.append(torch.arange(width) < len(sequence))
    token, is_real = torch.cat(tokens), torch.cat(real)
    rounds = _rounds(token, is_real)
    _, place = rounds[0]
    unread = torch.ones(len(token), dtype=torch.bool).index_fill_(0, place, False)
    repeats = tuple((token.to(device), place.to(device)) for token, place in rounds[1:])
    return Places(token.to(device), place.to(device), unread.to(device), repeats, tuple(shapes))


def _alike(sequences: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups of like length, the longest sequence of each first."""
    groups: list[list[Tensor]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        if not groups or len(sequence) < LIKE_LENGTH * len(groups[-1][0]):
            groups.append([])
        groups[-1].append(sequence)
    return groups


def _rounds(token: Tensor, is_real: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(tokens, their n-th places) for n = 1, 2, ..; no token occurs twice in a round, and each in the first."""
    place = is_real.nonzero().flatten()
    order = place[token[place].sort(stable=True).indices]  # places by token
    owner, count = token[order].unique_consecutive(return_counts=True)
    start = count.cumsum(0) - count
    return [(owner[count > n], order[start[count > n] + n]) for n in range(int(count.max()))]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, per_token: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return per_token.index_select(0, places.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        places: Places = ctx.places
        total = grad.index_select(0, places.first)
        if not places.repeats:
            return total, None
        exact = total.to(torch.promote_types(total.dtype, torch.float32))
        for token, place in places.repeats:
            exact[token] += grad.index_select(0, place)
        return exact.to(grad.dtype), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, per_place: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return per_place.index_select(0, places.first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        places: Places = ctx.places
        spread = grad.index_select(0, places.token)
        return spread.masked_fill_(places.unread.view(-1, *[1] * (grad.ndim - 1)), 0.0), None


def select_rows(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]`` of [N, E], whose gradient adds up in at least fp32 where an index occurs more than once."""
    selected: Tensor = _SelectRows.apply(rows, index)
    return selected


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        exact = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return exact.new_zeros(ctx.count, grad.shape[1]).index_add_(0, index, exact).to(grad.dtype), None
