"""A name that does not exist: which existing one was meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def closest(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known names nearest to `word` by edit distance, the nearest first; upper and lower case count as one.

    Args:
        word: the name that does not exist.
        known: the names that do.
        count: return at most this many.
        cutoff: from 0 (anything) to 1 (equal): how alike they have to be.
    """
    names: dict[str, str] = {}
    for name in known:
        names.setdefault(name.lower(), name)
    return [names[match] for match in get_close_matches(word.lower(), names, n=count, cutoff=cutoff)]


def did_you_mean(word: str, known: Iterable[str], count: int = 1) -> str:
    """`` Did you mean a or b?``, to append to a message, or nothing where no known name is like `word`."""
    return ask(closest(word, known, count))


def ask(names: Iterable[str]) -> str:
    """`` Did you mean a or b?``, to append to a message; empty without names."""
    listed = " or ".join(names)
    return f" Did you mean {listed}?" if listed else ""
