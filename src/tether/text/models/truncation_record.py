"""Records the tokens that truncated sampling kept, so that training normalises over exactly the same tokens.

Top-k and top-p truncate the vocabulary by the sampler's logits. The trainer's logits differ in the last bits, so
truncating again could keep different tokens; the sampler's choice is replayed instead (the "keep sampling mask" of
DeepSeek-V3.2, arXiv 2512.02556).

`tether.batch.KeptTokens` describes the storage format.

Legend: B = rows, T = response width, V = vocabulary, N = positions that are looked up, C = tokens in a chunk of V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NonTensorStack
from torch import Tensor

from tether.batch import KeptTokens

_BITS = 32


class KeptRecorder:
    """Records the kept tokens of B rows while they are sampled."""

    def __init__(self, rows: int, max_width: int, vocabulary: int, device: torch.device) -> None:
        """Allocate a record for rows of at most `max_width` positions."""
        self._count = torch.zeros(rows, max_width, dtype=torch.int32, device=device)
        self._limit = _mask_words(vocabulary)
        self._pieces: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, positions, and their words, concatenated

    def add(self, row: Tensor, position: Tensor, candidates: Tensor) -> None:
        """Record that `candidates` [R, V] (bool) could be sampled at `position` [R] of `row` [R]."""
        count = candidates.sum(dim=-1, dtype=torch.int32)
        self._count[row, position] = count
        listed = count <= self._limit
        self._pieces.append((row[listed], position[listed], candidates[listed].nonzero()[:, 1].to(torch.int32)))
        if not listed.all():
            self._pieces.append((row[~listed], position[~listed], _pack(candidates[~listed]).flatten()))

    def result(self, width: int) -> KeptTokens:
        """Return the record of all rows on the CPU; `width` is the number of positions of the longest row."""
        count = self._count[:, :width].clone()
        first, length = _layout(count, self._limit)
        words = count.new_empty(int(length.sum()))
        for row, position, recorded in self._pieces:
            words[_runs(first[row, position], length[row, position])] = recorded
        rows = [row.clone() for row in words.cpu().split(length.sum(dim=-1).tolist())]
        return KeptTokens(count=count.cpu(), words=NonTensorStack(*rows), batch_size=[len(rows)])


@dataclass(frozen=True)
class KeptSets:
    """The kept tokens of N positions, sorted so that a chunk of the vocabulary can be looked up."""

    num_positions: int
    token: Tensor  # [K] the listed tokens of all positions, ascending
    position: Tensor  # [K] position where each was kept
    masked: Tensor  # [D] positions that have a bit mask
    masks: Tensor  # [D, V / 32]

    @classmethod
    def read(cls, record: KeptTokens, slots: Tensor, vocabulary: int) -> KeptSets:
        """Look up the positions `slots` [N], which are flat indices into B * T."""
        limit, words = _mask_words(vocabulary), torch.cat(list(record.words))
        first, length = _layout(record.count, limit)
        assert len(words) == int(length.sum()), "the record was cut, or is of another vocabulary"
        first, count = first.flatten()[slots], record.count.flatten()[slots]
        listed, masked = (chosen.nonzero().flatten() for chosen in (count <= limit, count > limit))
        token, order = words[_runs(first[listed], count[listed])].sort()
        position = listed.to(torch.int32).repeat_interleave(count[listed])[order]
        masks = words[first[masked][:, None] + torch.arange(limit, device=slots.device)]
        return cls(len(slots), token, position, masked, masks)

    def cut(self, span: slice) -> Tensor:
        """Return [N, C] bool: whether each token in this range of the vocabulary was not kept."""
        cut = torch.ones(self.num_positions, span.stop - span.start, dtype=torch.bool, device=self.token.device)
        start, stop = torch.searchsorted(self.token, self.token.new_tensor([span.start, span.stop])).tolist()
        cut[self.position[start:stop], self.token[start:stop] - span.start] = False
        if len(self.masked):
            token = torch.arange(span.start, span.stop, device=cut.device)
            cut[self.masked] = (self.masks[:, token // _BITS] >> (token % _BITS) & 1) == 0
        return cut


def _mask_words(vocabulary: int) -> int:
    """Return the number of words of a bit mask over the vocabulary, the maximum for a position."""
    return -(-vocabulary // _BITS)


def _layout(count: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Return [B, T] start of each position's words in the concatenation of all rows, and their number."""
    length = count.clamp(max=limit)
    return length.flatten().cumsum(dim=0).view_as(length) - length, length


def _pack(candidates: Tensor) -> Tensor:
    """Pack the bits of [D, V] bool into [D, V / 32] int32."""
    rows, vocabulary = candidates.shape
    bits = candidates.new_zeros(rows, _mask_words(vocabulary) * _BITS)
    bits[:, :vocabulary] = candidates
    shift = torch.arange(_BITS, dtype=torch.int32, device=candidates.device)
    return (bits.view(rows, -1, _BITS).to(torch.int32) << shift).sum(dim=-1, dtype=torch.int32)


def _runs(first: Tensor, length: Tensor) -> Tensor:
    """Return the numbers ``first[i], first[i] + 1, ...``, ``length[i]`` of them for each i, concatenated."""
    before = length.cumsum(dim=0) - length
    return (first - before).repeat_interleave(length) + torch.arange(int(length.sum()), device=first.device)
