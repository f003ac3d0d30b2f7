"""Keys of verl that nothing here reads: `verl_keys.toml` says of each why, and which values ask for nothing."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tether.config.keys import show
from tether.config.problems import Problem

NAMED = 3
"""Keys of a file that a note names before it counts the rest."""


@dataclass(frozen=True)
class Unread:
    """Why a key of verl is read nowhere."""

    why: str
    refused: bool
    """Whether a value outside of `fine` is refused: verl would act on it."""
    fine: tuple[Any, ...] = ()
    """Values that ask for nothing."""


@cache
def _file() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def unread_keys() -> Mapping[str, Unread]:
    """Every such key with its row."""
    rows: dict[str, Unread] = {}
    for group in _file()["unread"]:
        for section in group.get("under", [""]):
            prefix = section and f"{section}."
            rows |= {prefix + key: Unread(group["why"], False) for key in group.get("keys", ())}
            for key, fine in group.get("unless", {}).items():
                rows[prefix + key] = Unread(group["why"], True, tuple(fine))
    return rows


def unread(path: str) -> Unread | None:
    """The row of a key, or of the mapping that it stands in; None where verl has no such key, or something reads it."""
    parts = path.split(".")
    above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((row for key in above if (row := unread_keys().get(key))), None)


def is_unread_section(path: str) -> bool:
    """Whether `path` is a section of such keys."""
    return any(key.startswith(f"{path}.") for key in unread_keys())


def renamed(path: str) -> str:
    """The name that a key of a newer verl has here."""
    for new, old in _file()["renamed"].items():
        if path == new or path.startswith(f"{new}."):
            return str(old) + path.removeprefix(new)
    return path


@cache
def composed_files() -> frozenset[str]:
    """Configuration files that verl ships, without their ending; they hold its defaults."""
    return frozenset(_file()["files"])


def unread_problems(values: Mapping[str, Any]) -> list[Problem]:
    """A problem for each key whose value verl would act on; `values` are those that the user gave."""
    leaves = dict(leaf for path, value in values.items() for leaf in _leaves(path, value))
    rows = {path: unread(path) for path in leaves}
    return [
        Problem(path, f"{show(leaves[path])} is refused: {row.why}", "leave it out, or set " + _either(row.fine))
        for path, row in rows.items()
        if row is not None and row.refused and leaves[path] not in (None, *row.fine)
    ]


def unread_notes(values: Mapping[str, Any], named: Collection[str]) -> list[str]:
    """One note for each reason, with the keys that do nothing for it: those in `named`, and some of the others."""
    silenced: dict[str, list[str]] = defaultdict(list)
    for path in sorted(values, key=lambda path: path not in named):
        row = unread(path)
        if row is not None and not row.refused and values[path] not in (None, {}):
            silenced[row.why].append(path)
    return [f"no effect: {_some(values, paths, named)} ({why})" for why, paths in silenced.items()]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values inside a value, such as an interpolated section."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    else:
        yield path, value


def _some(values: Mapping[str, Any], paths: list[str], named: Collection[str]) -> str:
    count = max(NAMED, sum(path in named for path in paths))
    shown, rest = paths[:count], len(paths) - count
    return ", ".join(f"{path}={show(values[path])}" for path in shown) + (f" and {rest} more keys" if rest > 0 else "")


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(map(show, values or (None,)))
