"""Tables whose rows are keys or patterns of keys (`*` stands for anything)."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import TypeVar

Row = TypeVar("Row")


def look_up(table: Mapping[str, Row], path: str) -> Row | None:
    """The row of `path`: its own, or else that of the first pattern that fits; None where there is none."""
    name = path if path in table else _first_fit(tuple(table), path)
    return None if name is None else table[name]


@cache
def _first_fit(patterns: tuple[str, ...], path: str) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(path, pattern)), None)
