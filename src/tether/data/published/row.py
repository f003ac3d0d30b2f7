"""A published row made into one of verl's layout."""

from __future__ import annotations

from collections.abc import Callable

from tether.types import JsonObject

Convert = Callable[[JsonObject, str, int], JsonObject]
"""Of the hub's row, its split and its number; raises ValueError with what is wrong in it."""


class Unusable(ValueError):
    """A row that the dataset has and no run can use: it is left out, and counted."""


def text_in(record: JsonObject, key: str) -> str:
    """The text of a column.

    Raises:
        ValueError: there is none.
    """
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"no text in `{key}`, but {value!r:.60}")
    return value


def rule_row(
    asked: str, source: str, truth: str, split: str, number: int, ability: str = "math", **extra: str
) -> JsonObject:
    """A question that a rule scores."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": asked}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": number, **extra},
    }
