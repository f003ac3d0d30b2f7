"""Keys of verl that nothing here reads; `verl_keys.toml` has the reason and the harmless values of each."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tether.config.keys import sections, show
from tether.config.problems import Problem
from tether.config.secrets import masked

MAX_NAMED = 3
"""Number of a file's keys that a note names; further ones are counted."""


@dataclass(frozen=True)
class Unread:
    """Why nothing here reads a key of verl."""

    why: str
    refused: bool
    """Whether a value that is not in `fine` is refused, because it would have an effect in verl."""
    fine: tuple[object, ...] = ()
    """Values without effect; for a key that is not refused, verl's default as text."""
    idle_if: Mapping[str, object] = field(default_factory=dict)
    """Values of other keys with which verl does not read the key either, so that it is noted instead of refused."""
    is_translated: bool = False
    """Whether other keys are derived from it."""

    def why_idle(self, values: Mapping[str, object]) -> str | None:
        """Return why verl does not read the key with these values of other keys; None if it does."""
        conditions = (f"{key} is {show(value)}" for key, value in self.idle_if.items() if values.get(key) == value)
        return next(conditions, None)


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def unread_keys() -> Mapping[str, Unread]:
    """Return the row of every such key."""
    rows: dict[str, Unread] = {}
    for group in _table()["unread"]:
        marks = {name: group[name] for name in ("idle_if", "is_translated") if name in group}
        for section in group.get("under", [""]):
            prefix = section and f"{section}."
            for key, _, default in (item.partition("=") for item in group.get("keys", ())):
                rows[prefix + key] = Unread(group["why"], False, (default,) if default else (), **marks)
            for key, fine in group.get("unless", {}).items():
                rows[prefix + key] = Unread(group["why"], True, tuple(fine), **marks)
    return rows


def unread(path: str) -> Unread | None:
    """Return the row of a key or of the mapping that contains it; None if verl has no such key, or it is read here."""
    names = path.split(".")
    for key in (".".join(names[:count]) for count in range(len(names), 0, -1)):
        if row := unread_keys().get(key):
            return row
        # The section is read here, so an unknown name in it is a typo, even if a section above it has a row.
        if key in sections():
            return None
    return None


def is_unread_section(path: str) -> bool:
    """Whether `path` is a section with such keys."""
    return any(key.startswith(f"{path}.") for key in unread_keys())


def renamed(path: str) -> str:
    """Return the name here for a key of a newer verl."""
    for new, old in _table()["renamed"].items():
        if path == new or path.startswith(f"{new}."):
            return str(old) + path.removeprefix(new)
    return path


@cache
def composed_files() -> dict[str, dict[Any, Any]]:
    """Return the configuration files that verl ships, by name without suffix, as differences from verl's defaults."""
    return {name: {} for name in _table()["files"]} | _table()["says"]


def unread_problems(unread_values: Mapping[str, Any], values: Mapping[str, object]) -> list[Problem]:
    """Return a problem for each key whose value would have an effect in verl.

    Args:
        unread_values: the user's values of keys that nothing here reads.
        values: all keys that are read, to which a row may refer: `"${actor_rollout_ref.rollout.n}"`.
    """
    leaves = dict(leaf for path, value in unread_values.items() for leaf in _leaves(path, value))
    all_values = {**values, **leaves}
    problems: list[Problem] = []
    refused_above: list[Unread] = []  # a refused mapping is reported once, however many keys it has
    for path, value in leaves.items():
        row = unread(path)
        if row is None or not row.refused or row.why_idle(all_values) or row in refused_above:
            continue
        fine = [all_values.get(str(item)[2:-1]) if str(item).startswith("${") else item for item in row.fine]
        if value not in (None, *fine):
            what = f"{_shown(path, value)} is refused: {row.why}"
            problems.append(Problem(path, what, f"leave it out, or set {_alternatives(fine)}"))
            if path not in unread_keys():
                refused_above.append(row)
    return problems


def unread_notes(values: Mapping[str, object], named: Collection[str], read_values: Mapping[str, object]) -> list[str]:
    """Return a note for each reason with the keys that have no effect because of it.

    Args:
        values: values of keys that nothing here reads.
        named: keys that a note always names; it only names a few of the others.
        read_values: values of all keys that are read.
    """
    silenced: dict[str, list[str]] = defaultdict(list)
    for path in sorted(values, key=lambda path: path not in named):
        row = unread(path)
        has_effect_in_verl = values[path] not in (None, {}) and row is not None and show(values[path]) not in row.fine
        if row is None or not has_effect_in_verl or row.is_translated:
            continue
        if why := row.why_idle(read_values) if row.refused else row.why:
            silenced[why].append(path)
    return [f"no effect: {_listing(values, paths, named)} ({why})" for why, paths in silenced.items()]


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the values inside a value, such as an interpolated section."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    else:
        yield path, value


def _listing(values: Mapping[str, object], paths: list[str], named: Collection[str]) -> str:
    count = max(MAX_NAMED, sum(path in named for path in paths))
    shown, num_hidden = paths[:count], len(paths) - count
    return ", ".join(f"{path}={_shown(path, values[path])}" for path in shown) + (
        f" and {num_hidden} more keys" if num_hidden > 0 else ""
    )


def _shown(path: str, value: object) -> str:
    """Return a value as text, masked if the key is named like a secret."""
    name = path.rpartition(".")[2]
    return show(masked({name: value})[name])


def _alternatives(values: Sequence[object]) -> str:
    named = [value for value in values if value is not None] or [None]
    return " or ".join(dict.fromkeys(map(show, named)))
