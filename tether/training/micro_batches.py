"""How a mini-batch is cut into micro-batches: a matter of memory alone, never of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RowSize(NamedTuple):
    """What a row costs."""

    prompt: int
    """A number that rows of one micro-batch share if and only if they have the same prompt."""
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        """Prompt and response."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class MicroBatching:
    """Limits of one forward and backward pass; at least one of the two is set."""

    max_rows: int | None = None
    max_tokens: int | None = None
    """Token budget (``use_dynamic_bsz``). A row that alone exceeds it gets a micro-batch of its own."""
    packed: bool = True
    """Tokens are counted as they are, a prompt that several rows share once; if False, every row counts as long as the
    longest of its micro-batch."""

    def split(self, rows: Sequence[RowSize]) -> list[list[int]]:
        """Row numbers of each micro-batch.

        Without a token budget rows stay in order. With one, they are sorted by length, so that the rows of a
        micro-batch are alike and few micro-batches are needed; packed rows of one prompt stay together.
        """
        groups: list[list[int]] = []
        for row in self._order(rows):
            if not groups or not self._fits([rows[i] for i in [*groups[-1], row]]):
                groups.append([])
            groups[-1].append(row)
        return groups

    def _order(self, rows: Sequence[RowSize]) -> list[int]:
        order = list(range(len(rows)))
        if self.max_tokens is None:
            return order
        order.sort(key=lambda i: -rows[i].tokens)
        if self.packed:
            place = {prompt: i for i, prompt in enumerate(dict.fromkeys(rows[i].prompt for i in order))}
            order.sort(key=lambda i: place[rows[i].prompt])
        return order

    def _fits(self, rows: list[RowSize]) -> bool:
        if self.packed:
            prompts = {row.prompt: row.prompt_tokens for row in rows}
            cost = sum(prompts.values()) + sum(row.response_tokens for row in rows)
        else:
            cost = max(row.tokens for row in rows) * len(rows)
        within_rows = self.max_rows is None or len(rows) <= self.max_rows
        return within_rows and (self.max_tokens is None or cost <= self.max_tokens)
