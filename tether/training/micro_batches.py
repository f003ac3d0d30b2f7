"""How a mini-batch is cut into micro-batches: a matter of memory alone, never of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatching:
    """Limits of one forward and backward pass; at least one of the two is set."""

    max_rows: int | None = None
    max_tokens: int | None = None
    """Token budget (``use_dynamic_bsz``). A row that alone exceeds it gets a micro-batch of its own."""
    packed: bool = True
    """Tokens are counted as they are; if False, every row counts as long as the longest of its micro-batch."""

    def split(self, lengths: Sequence[int]) -> list[list[int]]:
        """Row numbers of each micro-batch, for rows of these lengths (prompt and response tokens).

        Without a token budget rows stay in order. With one, they are sorted by length, so that the rows of a
        micro-batch are alike and few micro-batches are needed.
        """
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i]) if self.max_tokens else range(len(lengths))
        groups: list[list[int]] = []
        for row in order:
            if not groups or not self._fits([lengths[i] for i in [*groups[-1], row]]):
                groups.append([])
            groups[-1].append(row)
        return groups

    def _fits(self, lengths: list[int]) -> bool:
        cost = sum(lengths) if self.packed else max(lengths) * len(lengths)
        within_rows = self.max_rows is None or len(lengths) <= self.max_rows
        return within_rows and (self.max_tokens is None or cost <= self.max_tokens)
