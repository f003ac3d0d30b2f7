"""Tables with one row per key or pattern of keys, in which `*` matches anything."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import TypeVar

Row = TypeVar("Row")


def look_up(table: Mapping[str, Row], path: str) -> Row | None:
    """Return the row of `path`, or else of the first matching pattern; None if there is none."""
    name = path if path in table else _first_match(tuple(table), path)
    return None if name is None else table[name]


@cache
def _first_match(patterns: tuple[str, ...], path: str) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(path, pattern)), None)
