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
    out = Resolved()
    given = _only_resolvable(given, out.problems)
    tree = OmegaConf.create(nest({key.path: _start_value(key, given) for key in keys().values()}))
    for key in keys().values():
        if key.alias_of and key.path in given:
            given = _settle(key.path, key.alias_of, given, tree, out)
    for key in keys().values():
        value, source = _final_value(key, given, tree)
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


def _start_value(key: Key, given: Given) -> Any:
    if is_set(key, given):
        return given[key.path].value
    return f"${{{key.inherits.key}}}" if key.inherits else deepcopy(key.default)


def is_set(key: Key, given: Given) -> bool:
    """Whether the user's value counts: null leaves an inheriting key to its inheritance."""
    return key.path in given and not (key.inherits and given[key.path].value is None)


def _final_value(key: Key, given: Given, tree: DictConfig) -> tuple[Any, str]:
    value = _select(tree, key.path)
    if is_set(key, given):
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


def _only_resolvable(given: Given, problems: list[Problem]) -> Given:
    """Leave out values whose `${...}` leads nowhere; each becomes a problem."""
    interpolated = [path for path, setting in given.items() if "${" in str(setting.value)]
    tree = OmegaConf.create(nest({k.path: _start_value(k, given) for k in keys().values()})) if interpolated else None
    bad = set()
    for path in interpolated:
        assert tree is not None
        try:
            _select(tree, path)
        except OmegaConfBaseException as error:
            bad.add(path)
            what = f"{given[path].value!r} does not resolve ({str(error).splitlines()[0]})"
            problems.append(Problem(path, what, "name an existing key, or set the environment variable"))
    return {path: setting for path, setting in given.items() if path not in bad}


def _settle(alias: str, key: str, given: Given, tree: DictConfig, out: Resolved) -> Given:
    """Move the value of a second name to the key that it names, unless that key was given later."""
    value, own = _select(tree, alias), given[alias]
    rival = given.get(key)
    rival_value = _select(tree, key) if rival else None
    OmegaConf.update(tree, alias, None)
    given = {path: setting for path, setting in given.items() if path != alias}
    if value is None or value == rival_value:
        return given
    if rival is not None and rival_value is not None:
        if rival.position == own.position:
            what = f"{value!r} contradicts {key}={rival_value!r} in the same file; both name one quantity"
            out.problems.append(Problem(alias, what, f"keep {key}"))
            return given
        if rival.position > own.position:
            out.notes.append(f"{key}={rival_value} counts, being later than its other name {alias}={value}")
            return given
        out.notes.append(f"{alias}={value} counts, being later than its other name {key}={rival_value}")
    OmegaConf.update(tree, key, value)
    out.moved[key] = alias
    return {**given, key: Setting(value, f"{own.source}, as {alias}", own.position)}
