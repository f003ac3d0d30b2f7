"""Conversion of published rows to verl's layout."""

from __future__ import annotations

from collections.abc import Callable

from tether.types import JsonObject

Convert = Callable[[JsonObject, str, int], JsonObject]
"""Converts a hub's row, given its split and index; raises a ValueError that explains the problem."""


class Unusable(ValueError):
    """A row of a dataset that no run can use; such rows are dropped and counted."""


def text_in(record: JsonObject, key: str) -> str:
    """Return the text of a column.

    Raises:
        ValueError: the column has no text.
    """
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"no text in `{key}`, but {value!r:.60}")
    return value


def rule_row(
    prompt: str, source: str, truth: str, split: str, index: int, ability: str = "math", **extra: str
) -> JsonObject:
    """Return the row of a question that a rule scores."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, **extra},
    }
