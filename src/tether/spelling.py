"""Suggestions for a misspelled name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def closest(word: str, names: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the names nearest to `word` by edit distance, the nearest first, ignoring case.

    Args:
        word: the name that does not exist.
        names: the names that exist.
        count: maximum number of results.
        cutoff: minimum similarity, from 0 (anything) to 1 (equal).
    """
    by_lower_case: dict[str, str] = {}
    for name in names:
        by_lower_case.setdefault(name.lower(), name)
    matches = get_close_matches(word.lower(), by_lower_case, n=count, cutoff=cutoff)
    return [by_lower_case[match] for match in matches]


def did_you_mean(word: str, names: Iterable[str], count: int = 1) -> str:
    """Return `` Did you mean a or b?`` to append to a message, or nothing if no name is similar to `word`."""
    return ask(closest(word, names, count))


def ask(names: Iterable[str]) -> str:
    """Return `` Did you mean a or b?`` to append to a message; empty without names."""
    listed = " or ".join(names)
    return f" Did you mean {listed}?" if listed else ""
