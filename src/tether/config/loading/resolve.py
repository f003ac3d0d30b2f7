"""From what the user gave to a value for every key: interpolation, second names, inheritance, defaults."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

from omegaconf.errors import OmegaConfBaseException

from tether.config.keys import Key, keys
from tether.config.loading.given import Given, Setting
from tether.config.loading.interpolation import Values
from tether.config.problems import Problem
from tether.config.secrets import masked


@dataclass
class Resolved:
    """A value for every key, and what came up on the way."""

    given: Given = field(default_factory=dict)
    """The values that the user gave, without what was null, unreadable, or under a second name."""
    values: dict[str, object] = field(default_factory=dict)
    """Plain values; a required key that nobody gave is missing."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each value comes from."""
    moved: dict[str, str] = field(default_factory=dict)
    """Keys whose value the user gave under a second name -> that name."""
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unread: Given = field(default_factory=dict)
    """Keys of verl that nothing reads, with resolved values."""


def resolve(given: Given) -> Resolved:
    """Give every key its value.

    Order: interpolations of the user, then second names move to the key that they name (the later one counts),
    then each unset key inherits or takes its default.
    """
    out = Resolved(given={path: setting for path, setting in given.items() if path in keys()})
    rest = {path: setting for path, setting in given.items() if path not in keys()}
    values = Values(
        {key.path: _start_value(key, given) for key in keys().values()} | {path: rest[path].value for path in rest}
    )
    for path in out.given.copy():
        _drop_if_void(path, values, out)
    for key in keys().values():
        if key.alias_of and key.path in out.given:
            _settle(key.path, key.alias_of, values, out)
    for key in keys().values():
        value = _value(key, out.given, values)
        if value is not None or not key.required:
            out.values[key.path] = value
        out.sources[key.path] = _source(key, out.given)
    out.unread = {path: replace(setting, value=_unread_value(path, values)) for path, setting in rest.items()}
    return out


def _unread_value(path: str, values: Values) -> object:
    """The value of a key that nothing reads; null where its `${...}` leads to a key that nobody gave."""
    try:
        return values[path]
    except OmegaConfBaseException:
        return None


def _start_value(key: Key, given: Given) -> object:
    """A key's value, still unresolved; an unset key that inherits stands as an interpolation."""
    if key.path in given:
        return given[key.path].value
    return f"${{{key.inherits.key}}}" if key.inherits else deepcopy(key.default)


def _value(key: Key, given: Given, values: Values) -> object:
    if key.path in given or _is_built(key):
        return values[key.path]
    if key.inherits is None:
        return deepcopy(key.default)
    value = _value(keys()[key.inherits.key], given, values)
    return value if key.inherits.equals is None else value == key.inherits.equals


def _source(key: Key, given: Given) -> str:
    if key.path in given:
        return given[key.path].source
    if key.inherits is not None:
        return f"inherits {key.inherits.key}"
    return f"inherits {key.default}" if _is_built(key) else "default"


def _is_built(key: Key) -> bool:
    """Whether the default is put together from other keys."""
    return isinstance(key.default, str) and "${" in key.default


def _drop_if_void(path: str, values: Values, out: Resolved) -> None:
    """Take out a null that means "as if it were not there", and a `${...}` that leads nowhere, which is a problem."""
    key = keys()[path]
    try:
        void = values[path] is None and key.null_is_unset
    except OmegaConfBaseException as error:
        void = True
        what = f"{masked(out.given[path].value)!r} does not resolve ({str(error).splitlines()[0]})"
        out.problems.append(Problem(path, what, "name an existing key, or set the environment variable"))
    if void:
        del out.given[path]
        values[path] = _start_value(key, {})


def _settle(alias: str, key: str, values: Values, out: Resolved) -> None:
    """Move the value of a second name to the key that it names, unless that key was given later."""
    value, own = values[alias], out.given.pop(alias)
    rival = out.given.get(key)
    rival_value = values[key] if rival else None
    values[alias] = None
    if value is None or value == rival_value:
        return
    if rival is not None and rival_value is not None:
        if rival.position == own.position:
            shown, other = masked(value), masked(rival_value)
            what = f"{shown!r} contradicts {key}={other!r} given in the same place; both name one quantity"
            out.problems.append(Problem(alias, what, f"keep {key}"))
            return
        if rival.position > own.position:
            out.notes.append(f"{key}={rival_value} counts, being later than its other name {alias}={value}")
            return
        out.notes.append(f"{alias}={value} counts, being later than its other name {key}={rival_value}")
    values[key] = value
    out.moved[key] = alias
    out.given[key] = Setting(value, f"{own.source}, as {alias}", own.position)
