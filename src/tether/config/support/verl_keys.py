"""Keys of verl that nothing here reads: `verl_keys.toml` says of each why, and which values ask for nothing."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tether.config.keys import show
from tether.config.problems import Problem
from tether.config.secrets import masked

NAMED = 3
"""Keys of a file that a note names before it counts the rest."""


@dataclass(frozen=True)
class Unread:
    """Why a key of verl is read nowhere."""

    why: str
    refused: bool
    """Whether a value outside of `fine` is refused: verl would act on it."""
    fine: tuple[object, ...] = ()
    """Values that ask for nothing; of a key that is not refused, verl's default as it is shown."""
    idle_if: Mapping[str, object] = field(default_factory=dict)
    """Keys with values beside which verl does not read it: then it is noted, not refused."""
    is_translated: bool = False
    """Other keys follow from it."""

    def why_idle(self, known: Mapping[str, object]) -> str | None:
        """Return why verl does not read it beside these values; None where it does."""
        held = (f"{key} is {show(value)}" for key, value in self.idle_if.items() if known.get(key) == value)
        return next(held, None)


@cache
def _file() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def unread_keys() -> Mapping[str, Unread]:
    """Every such key with its row."""
    rows: dict[str, Unread] = {}
    for group in _file()["unread"]:
        marks = {name: group[name] for name in ("idle_if", "is_translated") if name in group}
        for section in group.get("under", [""]):
            prefix = section and f"{section}."
            for key, _, default in (item.partition("=") for item in group.get("keys", ())):
                rows[prefix + key] = Unread(group["why"], False, (default,) if default else (), **marks)
            for key, fine in group.get("unless", {}).items():
                rows[prefix + key] = Unread(group["why"], True, tuple(fine), **marks)
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
def composed_files() -> dict[str, dict[Any, Any]]:
    """Configuration files that verl ships, without their ending, and what they say beside its defaults."""
    return {name: {} for name in _file()["files"]} | _file()["says"]


def unread_problems(given: Mapping[str, Any], values: Mapping[str, object]) -> list[Problem]:
    """A problem for each key whose value verl would act on.

    Args:
        given: keys that nothing reads, with the values that the user gave.
        values: all keys that are read, which a row may name: `"${actor_rollout_ref.rollout.n}"`.
    """
    leaves = dict(leaf for path, value in given.items() for leaf in _leaves(path, value))
    known = {**values, **leaves}
    problems = []
    for path, value in leaves.items():
        row = unread(path)
        if row is None or not row.refused or row.why_idle(known):
            continue
        fine = [known.get(str(item)[2:-1]) if str(item).startswith("${") else item for item in row.fine]
        if value not in (None, *fine):
            what = f"{_shown(path, value)} is refused: {row.why}"
            problems.append(Problem(path, what, f"leave it out, or set {_either(fine)}"))
    return problems


def unread_notes(values: Mapping[str, object], named: Collection[str], known: Mapping[str, object]) -> list[str]:
    """Return one note for each reason, with the keys that do nothing for it: those in `named`, and some of the others.

    Args:
        values: keys that nothing reads, with their values.
        named: those that a note names all.
        known: all keys that are read.
    """
    silenced: dict[str, list[str]] = defaultdict(list)
    for path in sorted(values, key=lambda path: path not in named):
        row = unread(path)
        asks = values[path] not in (None, {}) and row is not None and show(values[path]) not in row.fine
        if row is None or not asks or row.is_translated:
            continue
        if why := row.why_idle(known) if row.refused else row.why:
            silenced[why].append(path)
    return [f"no effect: {_some(values, paths, named)} ({why})" for why, paths in silenced.items()]


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """The values inside a value, such as an interpolated section."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    else:
        yield path, value


def _some(values: Mapping[str, object], paths: list[str], named: Collection[str]) -> str:
    count = max(NAMED, sum(path in named for path in paths))
    shown, rest = paths[:count], len(paths) - count
    return ", ".join(f"{path}={_shown(path, values[path])}" for path in shown) + (
        f" and {rest} more keys" if rest > 0 else ""
    )


def _shown(path: str, value: object) -> str:
    """The value as `show` words it, hidden where the key is named like a secret."""
    name = path.rpartition(".")[2]
    return show(masked({name: value})[name])


def _either(values: Sequence[object]) -> str:
    named = [value for value in values if value is not None] or [None]
    return " or ".join(map(show, named))
