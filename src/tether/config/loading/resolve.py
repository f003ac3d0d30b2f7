"""Resolves the user's settings to a value for every key: interpolations, aliases, inheritance, defaults."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

from omegaconf.errors import OmegaConfBaseException

from tether.config.keys import Key, keys
from tether.config.loading.interpolation import Values
from tether.config.loading.settings import Setting, Settings
from tether.config.problems import Problem
from tether.config.secrets import masked


@dataclass
class Resolved:
    """A value for every key, with notes and problems."""

    settings: Settings = field(default_factory=dict)
    """The user's settings, with aliases moved to the keys that they name, and without null and invalid values."""
    values: dict[str, object] = field(default_factory=dict)
    """Plain values; a required key that is not set is missing."""
    sources: dict[str, str] = field(default_factory=dict)
    """Source of each value."""
    moved: dict[str, str] = field(default_factory=dict)
    """Key that the user set through an alias -> the alias."""
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unread: Settings = field(default_factory=dict)
    """Resolved values of verl's keys that nothing reads."""


def resolve(settings: Settings) -> Resolved:
    """Resolve the value of every key.

    First interpolations are resolved, then aliases are moved to the keys that they name (the later setting wins), then
    each unset key inherits its value or gets its default.
    """
    out = Resolved(settings={path: setting for path, setting in settings.items() if path in keys()})
    unread = {path: setting for path, setting in settings.items() if path not in keys()}
    values = Values(
        {key.path: _start_value(key, settings) for key in keys().values()}
        | {path: unread[path].value for path in unread}
    )
    for path in out.settings.copy():
        _drop_if_unset(path, values, out)
    for key in keys().values():
        if key.alias_of and key.path in out.settings:
            _resolve_alias(key.path, key.alias_of, values, out)
    for key in keys().values():
        value = _value(key, out.settings, values)
        if value is not None or not key.required:
            out.values[key.path] = value
        out.sources[key.path] = _source(key, out.settings)
    out.unread = {path: replace(setting, value=_unread_value(path, values)) for path, setting in unread.items()}
    return out


def _unread_value(path: str, values: Values) -> object:
    """Return the value of a key that nothing reads; None if its `${...}` does not resolve."""
    try:
        return values[path]
    except OmegaConfBaseException:
        return None


def _start_value(key: Key, settings: Settings) -> object:
    """Return the unresolved value of a key; for an unset key that inherits, return an interpolation."""
    if key.path in settings:
        return settings[key.path].value
    return f"${{{key.inherits.key}}}" if key.inherits else deepcopy(key.default)


def _value(key: Key, settings: Settings, values: Values) -> object:
    if key.path in settings or _is_interpolated_default(key):
        return values[key.path]
    if key.inherits is None:
        return deepcopy(key.default)
    value = _value(keys()[key.inherits.key], settings, values)
    return value if key.inherits.equals is None else value == key.inherits.equals


def _source(key: Key, settings: Settings) -> str:
    if key.path in settings:
        return settings[key.path].source
    if key.inherits is not None:
        return f"inherits {key.inherits.key}"
    return f"inherits {key.default}" if _is_interpolated_default(key) else "default"


def _is_interpolated_default(key: Key) -> bool:
    """Whether the default contains an interpolation of other keys."""
    return isinstance(key.default, str) and "${" in key.default


def _drop_if_unset(path: str, values: Values, out: Resolved) -> None:
    """Remove a null that means unset, and report and remove a `${...}` that does not resolve."""
    key = keys()[path]
    try:
        is_unset = values[path] is None and key.null_is_unset
    except OmegaConfBaseException as error:
        is_unset = True
        what = f"{masked(out.settings[path].value)!r} does not resolve ({str(error).splitlines()[0]})"
        out.problems.append(Problem(path, what, "name an existing key, or set the environment variable"))
    if is_unset:
        del out.settings[path]
        values[path] = _start_value(key, {})


def _resolve_alias(alias: str, key: str, values: Values, out: Resolved) -> None:
    """Move the value of an alias to the key that it names, unless that key was set later."""
    value, alias_setting = values[alias], out.settings.pop(alias)
    key_setting = out.settings.get(key)
    key_value = values[key] if key_setting else None
    values[alias] = None
    if value is None or value == key_value:
        return
    if key_setting is not None and key_value is not None:
        if key_setting.position == alias_setting.position:
            shown, other = masked(value), masked(key_value)
            what = f"{shown!r} contradicts {key}={other!r} given in the same place; both name one quantity"
            out.problems.append(Problem(alias, what, f"keep {key}"))
            return
        if key_setting.position > alias_setting.position:
            out.notes.append(f"{key}={key_value} counts, being later than its other name {alias}={value}")
            return
        out.notes.append(f"{alias}={value} counts, being later than its other name {key}={key_value}")
    values[key] = value
    out.moved[key] = alias
    out.settings[key] = Setting(value, f"{alias_setting.source}, as {alias}", alias_setting.position)
