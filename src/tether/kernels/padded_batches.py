"""Conversion between packed tokens and the padded batches that attention runs on.

Sequences of similar length run together as a padded batch, because one kernel call for each would cost more than the
padding. A prompt that several responses continue occurs once among the packed tokens, but in each of their sequences::

    tokens     [ p0 p1 | a0 a1 | b0 ]          a prompt of two tokens and its two responses
    sequences    p0 p1   a0 a1                 one batch of two rows; padding repeats a sequence's last token,
                 p0 p1   b0 (b0)               at positions that no causal query sees

PyTorch's own gradient of an indexed tensor adds one number at a time, and in fp32 in no fixed order. The functions here
add full rows, in fp32 and in the order of the sequences.

Legend: N = tokens, P = slots in all batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from tether.types import AutogradContext

Ints: TypeAlias = NDArray[np.int64]
LIKE_LENGTH = 0.75
"""A sequence joins a batch if its length is at least this fraction of the batch's longest sequence."""


@dataclass(frozen=True)
class PaddedBatches:
    """The slots of each token; built by `padded_batches`."""

    token: Tensor  # [P] the token in a slot
    first: Tensor  # [N] the first slot of a token
    unread: Tensor  # [P] bool: the slot is not the first one of its token, so its attention output is not used
    repeats: tuple[tuple[Tensor, Tensor], ...]
    """Tokens and their second slots, then tokens and their third slots, and so on; without padding."""
    shapes: tuple[tuple[int, int], ...]
    """Rows and width of each batch."""

    def spread(self, per_token: Tensor) -> Tensor:
        """Copy [N, ..] to all slots [P, ..]; the gradient of a token is the sum over its slots."""
        spread: Tensor = _Spread.apply(per_token, self)
        return spread

    def collect(self, per_slot: Tensor) -> Tensor:
        """Read [N, ..] from the first slot of each token in [P, ..]."""
        collected: Tensor = _Collect.apply(per_slot, self)
        return collected

    def batches(self, per_slot: Tensor) -> list[Tensor]:
        """Split [P, ..] into one [rows, width, ..] for each batch."""
        batches = per_slot.split([rows * width for rows, width in self.shapes])
        return [batch.unflatten(0, shape) for batch, shape in zip(batches, self.shapes, strict=True)]


@lru_cache(maxsize=8)  # every layer asks for the same batches, forward and backward
def padded_batches(
    lengths: tuple[int, ...], prefixes: tuple[int | None, ...] | None, device: torch.device
) -> PaddedBatches:
    """Return the batches of the sequences that `tether.text.models.layers.attention.Packed` describes."""
    starts = list(itertools.accumulate(lengths, initial=0))
    spans = [np.arange(start, stop) for start, stop in itertools.pairwise(starts)]
    if prefixes is None:
        sequences = spans
    else:
        continued = set(prefixes)
        chains = [(prefix, segment) for segment, prefix in enumerate(prefixes) if segment not in continued]
        sequences = [
            spans[segment] if prefix is None else np.concatenate([spans[prefix], spans[segment]])
            for prefix, segment in chains
        ]
    tokens, real, shapes = [], [], []
    for group in _of_like_length(sequences):
        width = len(group[0])
        shapes.append((len(group), width))
        for sequence in group:
            tokens.append(sequence[np.minimum(np.arange(width), len(sequence) - 1)])
            real.append(np.arange(width) < len(sequence))
    return _slots(np.concatenate(tokens), np.concatenate(real), tuple(shapes), device)


@lru_cache(maxsize=8)
def with_prefixes(lengths: tuple[int, ...], prefixes: tuple[int | None, ...], device: torch.device) -> PaddedBatches:
    """Return one row without padding in which each segment follows its prefix."""
    starts = list(itertools.accumulate(lengths, initial=0))
    spans = [np.arange(start, stop) for start, stop in itertools.pairwise(starts)]
    before = [[spans[prefix]] if prefix is not None else [] for prefix in prefixes]
    token = np.concatenate([span for prefix, segment in zip(before, spans, strict=True) for span in (*prefix, segment)])
    return _slots(token, np.ones(len(token), dtype=bool), ((1, len(token)),), device)


def _slots(
    token: Ints, is_real: NDArray[np.bool_], shapes: tuple[tuple[int, int], ...], device: torch.device
) -> PaddedBatches:
    """Return the slots of each token, computed from the token in each slot and whether the slot is not padding."""
    (_, first), *repeats = _occurrences(token, is_real)
    unread = np.ones(len(token), dtype=bool)
    unread[first] = False

    def moved(x: NDArray[np.generic]) -> Tensor:
        return torch.tensor(x.tolist(), device=device)  # under FakeTensorMode an array would have no values

    on_device = tuple((moved(owner), moved(slot)) for owner, slot in repeats)
    return PaddedBatches(moved(token), moved(first), moved(unread), on_device, shapes)


def _of_like_length(sequences: Sequence[Ints]) -> list[list[Ints]]:
    """Group sequences by similar length, the longest sequence of each group first."""
    groups: list[list[Ints]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        if not groups or len(sequence) < LIKE_LENGTH * len(groups[-1][0]):
            groups.append([])
        groups[-1].append(sequence)
    return groups


def _occurrences(token: Ints, is_real: NDArray[np.bool_]) -> list[tuple[Ints, Ints]]:
    """Return (tokens, their n-th slots) for n = 1, 2, ..; an entry has no token twice, and the first entry has all."""
    slot = is_real.nonzero()[0]
    order = slot[token[slot].argsort(kind="stable")]  # sorted by token
    owner, start, count = np.unique(token[order], return_index=True, return_counts=True)
    return [(owner[count > n], order[start[count > n] + n]) for n in range(count.max())]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, per_token: Tensor, batches: PaddedBatches) -> Tensor:
        ctx.batches = batches
        return per_token.index_select(0, batches.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        batches: PaddedBatches = ctx.batches
        total = grad.index_select(0, batches.first)
        if not batches.repeats:
            return total, None
        exact = total.to(torch.promote_types(total.dtype, torch.float32))
        for token, slot in batches.repeats:
            exact[token] += grad.index_select(0, slot)
        return exact.to(grad.dtype), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, per_slot: Tensor, batches: PaddedBatches) -> Tensor:
        ctx.batches = batches
        return per_slot.index_select(0, batches.first)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        batches: PaddedBatches = ctx.batches
        spread = grad.index_select(0, batches.token)
        return spread.masked_fill_(batches.unread.view(-1, *[1] * (grad.ndim - 1)), 0.0), None


def select_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return ``rows[index]`` of [N, E]; the gradient adds up in at least fp32 where an index occurs more than once."""
    selected: Tensor = _SelectRows.apply(rows, index)
    return selected


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        exact = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return exact.new_zeros(ctx.count, grad.shape[1]).index_add_(0, index, exact).to(grad.dtype), None
