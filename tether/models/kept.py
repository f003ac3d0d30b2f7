"""Which tokens truncated sampling kept, recorded so that training normalises over exactly the same ones.

Top-k and top-p cut the vocabulary by the sampler's logits. The trainer's differ in the last bits, so a cut of its own
would fall elsewhere; the sampler's is replayed instead (the "keep sampling mask" of DeepSeek-V3.2, arXiv 2512.02556).

A row's record is int32 [T + W]. First the number of tokens kept at each of its T positions, 0 where nothing was
sampled. Then, position after position, which ones: their ids, ascending, or a bit mask of the vocabulary where that is
shorter (token v is bit v % 32 of word v // 32). Zeros follow up to the longest record. A position thus takes
``4 + min(4 * kept, V / 8)`` bytes. Two positions of a vocabulary of 64, whose bit mask has two words::

    kept {5, 9}, then {0, 1, 33}     ->     [2, 3,   5, 9,   0b11, 0b10]

Legend: B = rows, T = response width, V = vocabulary, N = positions that are read, C = tokens in a chunk of V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = 32


class KeptRecorder:
    """Takes down the kept tokens of B rows while they are sampled."""

    def __init__(self, rows: int, max_width: int, vocabulary: int, device: torch.device) -> None:
        """No row will have more than `max_width` positions."""
        self._count = torch.zeros(rows, max_width, dtype=torch.int32, device=device)
        self._limit = _mask_words(vocabulary)
        self._pieces: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, positions, and their words end to end

    def add(self, row: Tensor, position: Tensor, kept: Tensor) -> None:
        """At `position` [R] of `row` [R] the tokens `kept` [R, V] (bool) could be drawn."""
        count = kept.sum(dim=-1, dtype=torch.int32)
        self._count[row, position] = count
        listed = count <= self._limit
        self._pieces.append((row[listed], position[listed], kept[listed].nonzero()[:, 1].to(torch.int32)))
        if not listed.all():
            self._pieces.append((row[~listed], position[~listed], _pack(kept[~listed]).flatten()))

    def record(self, width: int) -> Tensor:
        """[B, width + W] int32, see above; `width` is the longest row's."""
        count = self._count[:, :width]
        length = count.clamp(max=self._limit)
        end = width + length.cumsum(dim=-1)
        record = count.new_zeros(len(count), int(end.max()))
        record[:, :width] = count
        first = end - length + torch.arange(len(count), device=count.device)[:, None] * record.shape[1]
        for row, position, words in self._pieces:
            record.view(-1)[_runs(first[row, position], length[row, position])] = words
        return record


@dataclass(frozen=True)
class KeptSets:
    """The kept tokens of N positions, laid out for a walk over the vocabulary."""

    num_positions: int
    token: Tensor  # [K] the listed tokens of all positions, ascending
    position: Tensor  # [K] where each was kept
    masked: Tensor  # [D] positions that have a bit mask
    masks: Tensor  # [D, V / 32]

    @classmethod
    def read(cls, record: Tensor, slots: Tensor, width: int, vocabulary: int) -> KeptSets:
        """Look up the positions `slots` [N], flat in B * T, in a `record` of rows of `width` T positions."""
        limit = _mask_words(vocabulary)
        row = slots // width
        length = record[:, :width].clamp(max=limit)
        first = width + length.cumsum(dim=-1) - length + torch.arange(len(record), device=row.device)[:, None] * (
            record.shape[1]
        )
        count, first = record[row, slots % width], first.flatten()[slots]
        listed, masked = (chosen.nonzero().flatten() for chosen in (count <= limit, count > limit))
        words = record.flatten()
        token, order = words[_runs(first[listed], count[listed])].sort()
        position = listed.to(torch.int32).repeat_interleave(count[listed])[order]
        masks = words[first[masked][:, None] + torch.arange(limit, device=row.device)]
        return cls(len(slots), token, position, masked, masks)

    def cut(self, span: slice) -> Tensor:
        """[N, C] bool: the tokens of this range of the vocabulary that were not kept."""
        cut = torch.ones(self.num_positions, span.stop - span.start, dtype=torch.bool, device=self.token.device)
        start, stop = torch.searchsorted(self.token, self.token.new_tensor([span.start, span.stop])).tolist()
        cut[self.position[start:stop], self.token[start:stop] - span.start] = False
        if len(self.masked):
            token = torch.arange(span.start, span.stop, device=cut.device)
            cut[self.masked] = (self.masks[:, token // _BITS] >> (token % _BITS) & 1) == 0
        return cut


def _mask_words(vocabulary: int) -> int:
    """Words in a bit mask of the vocabulary: the most that a position takes."""
    return -(-vocabulary // _BITS)


def _pack(kept: Tensor) -> Tensor:
    """Bits of [D, V] bool as [D, V / 32] int32."""
    rows, vocabulary = kept.shape
    bits = kept.new_zeros(rows, _mask_words(vocabulary) * _BITS)
    bits[:, :vocabulary] = kept
    place = torch.arange(_BITS, dtype=torch.int32, device=kept.device)
    return (bits.view(rows, -1, _BITS).to(torch.int32) << place).sum(dim=-1, dtype=torch.int32)


def _runs(first: Tensor, length: Tensor) -> Tensor:
    """The numbers ``first[i], first[i] + 1, ...``, ``length[i]`` of them, one run after the other."""
    before = length.cumsum(dim=0) - length
    return (first - before).repeat_interleave(length) + torch.arange(int(length.sum()), device=first.device)
