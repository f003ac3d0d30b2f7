"""Division of a mini-batch into micro-batches, which affects memory only, never the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple


class RowSize(NamedTuple):
    """The size of a row in tokens."""

    prompt: int
    """The row's `uid`, which rows of the same prompt share."""
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        """Return the tokens of prompt and response."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class MicroBatching:
    """Limits of one forward and backward pass, of which at least one is set."""

    max_rows: int | None = None
    max_tokens: int | None = None
    """Token budget (``use_dynamic_bsz``). A row that exceeds it gets its own micro-batch."""
    packed: bool = True
    """Whether only actual tokens count, and a shared prompt once; if False, every row counts as long as the longest of
    its micro-batch."""
    key: str = field(default="the limit of a micro-batch", compare=False)
    """The key of the configuration that set the limit."""
    ranks: int = field(default=1, compare=False)
    """Number of ranks that split the tokens of a micro-batch; the setting is the tokens of one of them."""

    def __str__(self) -> str:
        """Return the setting as written in the configuration."""
        return "{}={}".format(*self.setting)

    @property
    def setting(self) -> tuple[str, int]:
        """Return the key of the configuration and its value."""
        if self.max_tokens is not None:
            return self.key, max(1, self.max_tokens // self.ranks)
        assert self.max_rows is not None
        return self.key, self.max_rows

    def halved(self, rows: Sequence[RowSize]) -> MicroBatching | None:
        """Return limits that split the largest micro-batch of these rows in two, or None if each is a single row."""
        several = [group for group in self.split(rows) if len(group) > 1]
        if not several:
            return None
        if self.max_tokens is None:
            return replace(self, max_rows=max(map(len, several)) // 2)
        return replace(self, max_tokens=max(1, max(self._cost([rows[i] for i in group]) for group in several) // 2))

    def split(self, rows: Sequence[RowSize]) -> list[list[int]]:
        """Return the row indices of each micro-batch.

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
            rank = {prompt: i for i, prompt in enumerate(dict.fromkeys(rows[i].prompt for i in order))}
            order.sort(key=lambda i: rank[rows[i].prompt])
        return order

    def _fits(self, rows: list[RowSize]) -> bool:
        within_rows = self.max_rows is None or len(rows) <= self.max_rows
        return within_rows and (self.max_tokens is None or self._cost(rows) <= self.max_tokens)

    def _cost(self, rows: list[RowSize]) -> int:
        """Return the tokens of a micro-batch."""
        if self.packed:
            prompts = {row.prompt: row.prompt_tokens for row in rows}
            return sum(prompts.values()) + sum(row.response_tokens for row in rows)
        return max(row.tokens for row in rows) * len(rows)
