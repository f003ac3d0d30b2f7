"""Names of runs that are shown together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest endings of the folders' paths that are unique."""
    paths = [folder.resolve().parts for folder in folders]
    names: list[str] = []
    for length in range(1, max(map(len, paths), default=0) + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names
