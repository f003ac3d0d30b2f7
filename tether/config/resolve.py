"""From what the user gave to a value for every key: interpolation, second names, inheritance, defaults."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tether.config.given import Given, Setting
from tether.config.keys import Key, keys
from tether.config.problems import Problem


@dataclass
class Resolved:
    """A value for every key, and what came up on the way."""

    given: Given = field(default_factory=dict)
    """What the user gave, without what was null, unreadable, or under a second name."""
    values: dict[str, Any] = field(default_factory=dict)
    """Plain values; a required key that nobody gave is missing."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each value comes from."""
    moved: dict[str, str] = field(default_factory=dict)
    """Keys whose value the user gave under a second name -> that name."""
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def resolve(given: Given) -> Resolved:
    """Give every key its value.

    Order: interpolations of the user, then second names move to the key that they name (the later one counts),
    then each unset key inherits or takes its default.
    """
    out = Resolved(given=given)
    _drop_unresolvable(out)
    _drop_unset(out)
    tree = _tree(out.given)
    for key in keys().values():
        if key.alias_of and key.path in out.given:
            _settle(key.path, key.alias_of, tree, out)
    for key in keys().values():
        value, source = _final_value(key, out.given, tree)
        if value is not None or not key.required:
            out.values[key.path] = value
        out.sources[key.path] = source
    return out


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `{"a.b": 1}` into `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        inner = tree
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[leaf] = value
    return tree


def _tree(given: Given) -> DictConfig:
    """All keys with their values still unresolved; an unset key that inherits stands as an interpolation."""
    return OmegaConf.create(nest({key.path: _start_value(key, given) for key in keys().values()}))


def _start_value(key: Key, given: Given) -> Any:
    if key.path in given:
        return given[key.path].value
    return f"${{{key.inherits.key}}}" if key.inherits else deepcopy(key.default)


def _final_value(key: Key, given: Given, tree: DictConfig) -> tuple[Any, str]:
    value = _select(tree, key.path)
    if key.path in given:
        return value, given[key.path].source
    if key.inherits is None:
        built = isinstance(key.default, str) and "${" in key.default
        return value, f"inherits {key.default}" if built else "default"
    if key.inherits.equals is not None:
        value = value == key.inherits.equals
    return value, f"inherits {key.inherits.key}"


def _select(tree: DictConfig, path: str) -> Any:
    value = OmegaConf.select(tree, path)
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value


def _drop_unresolvable(out: Resolved) -> None:
    """Take out values whose `${...}` leads nowhere; each becomes a problem."""
    tree = _tree(out.given)
    for path, setting in list(out.given.items()):
        try:
            _select(tree, path)
        except OmegaConfBaseException as error:
            what = f"{setting.value!r} does not resolve ({str(error).splitlines()[0]})"
            out.problems.append(Problem(path, what, "name an existing key, or set the environment variable"))
            out.given = _without(out.given, path)


def _drop_unset(out: Resolved) -> None:
    """Take out nulls that mean "as if it were not there"."""
    tree = _tree(out.given)
    for path in list(out.given):
        if keys()[path].null_is_unset and _select(tree, path) is None:
            out.given = _without(out.given, path)


def _without(given: Given, path: str) -> Given:
    return {other: setting for other, setting in given.items() if other != path}


def _settle(alias: str, key: str, tree: DictConfig, out: Resolved) -> None:
    """Move the value of a second name to the key that it names, unless that key was given later."""
    value, own = _select(tree, alias), out.given[alias]
    rival = out.given.get(key)
    rival_value = _select(tree, key) if rival else None
    OmegaConf.update(tree, alias, None)
    out.given = _without(out.given, alias)
    if value is None or value == rival_value:
        return
    if rival is not None and rival_value is not None:
        if rival.position == own.position:
            what = f"{value!r} contradicts {key}={rival_value!r} in the same file; both name one quantity"
            out.problems.append(Problem(alias, what, f"keep {key}"))
            return
        if rival.position > own.position:
            out.notes.append(f"{key}={rival_value} counts, being later than its other name {alias}={value}")
            return
        out.notes.append(f"{alias}={value} counts, being later than its other name {key}={rival_value}")
    OmegaConf.update(tree, key, value)
    out.moved[key] = alias
    out.given = {**out.given, key: Setting(value, f"{own.source}, as {alias}", own.position)}
