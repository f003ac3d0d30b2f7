"""Blocks of 32 tokens of packed segments, the unit of work of packed attention, as a table of integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tether.kernels.cpu.avx512_instructions import COLUMNS

FIELDS = 9
(
    FIRST_TOKEN,
    NUM_TOKENS,
    POSITION,
    SEGMENT_START,
    SEGMENT_END,
    PREFIX_START,
    PREFIX_TOKENS,
    CONTINUATIONS_START,
    NUM_CONTINUATIONS,
) = range(FIELDS)


@dataclass(frozen=True)
class Blocks:
    """The blocks of 32 tokens of a packed batch; built by `blocks_of`."""

    table: Tensor
    """[B, 9] int64, the columns being: first token, number of tokens, position of the first token in its segment; first
    block of the segment and the end of its blocks; first block of its prefix and the prefix's tokens (0: none);
    start and number of the segment's entries in `continuations`."""
    continuations: Tensor
    """Blocks of the segments that continue a segment: these, and the segment's own later blocks, see its keys."""
    longest: int
    """The largest number of keys that a query can see, rounded up to full blocks."""


@lru_cache(maxsize=8)  # every layer asks for the same, forward and backward
def blocks_of(lengths: tuple[int, ...], prefixes: tuple[int | None, ...] | None) -> Blocks:
    """Return the blocks of the segments that `tether.text.models.layers.Packed` describes."""
    counts = [-(-length // COLUMNS) for length in lengths]
    start = [sum(counts[:segment]) for segment in range(len(counts))]
    prefixes = prefixes or (None,) * len(lengths)
    continuing: list[list[int]] = [[] for _ in lengths]
    for segment, prefix in enumerate(prefixes):
        if prefix is not None:
            continuing[prefix].extend(range(start[segment], start[segment] + counts[segment]))
    table: list[tuple[int, ...]] = []
    continuations: list[int] = []
    longest = token = 0
    for segment, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
        before = (0, 0) if prefix is None else (start[prefix], lengths[prefix])
        longest = max(longest, counts[segment] + -(-before[1] // COLUMNS))
        of_segment = (start[segment], start[segment] + counts[segment])
        after = (len(continuations), len(continuing[segment]))
        for position in range(0, length, COLUMNS):
            table.append((token + position, min(COLUMNS, length - position), position, *of_segment, *before, *after))
        continuations.extend(continuing[segment])
        token += length
    return Blocks(torch.tensor(table), torch.tensor(continuations, dtype=torch.int64), longest * COLUMNS)
