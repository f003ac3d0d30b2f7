"""Tables whose rows are keys or patterns of keys (`*` stands for anything)."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

Row = TypeVar("Row")


def look_up(table: Mapping[str, Row], path: str) -> Row | None:
    """The row of `path`: its own, or else that of the first pattern that fits; None where there is none."""
    if path in table:
        return table[path]
    return next((row for pattern, row in table.items() if fnmatchcase(path, pattern)), None)
