"""Problems of missing values and values of the wrong type."""

from __future__ import annotations

from pydantic import ValidationError

from tether.config.keys import Key, keys, show
from tether.config.loading.resolve import Resolved
from tether.config.loading.typos import value_meant
from tether.config.problems import Problem
from tether.config.secrets import masked


def type_problems(error: ValidationError, resolved: Resolved) -> list[Problem]:
    """Return a problem for each key that is missing or has the wrong type, except keys that inherit such a value."""
    bad = dict.fromkeys(_key_of(detail["loc"]) for detail in error.errors())
    return [_problem(keys()[path], resolved) for path in bad if not _repeats(path, set(bad), resolved)]


def expected(key: Key) -> str:
    """Return a description of the values that a key accepts, without choices that are refused."""
    return key.type_text.replace(", ".join(key.choices), ", ".join(key.allowed)) if key.allowed else key.type_text


def _key_of(loc: tuple[int | str, ...]) -> str:
    """Return the key of a pydantic error: its location without list indices."""
    names = [str(item) for item in loc]
    return next(path for end in range(len(names), 0, -1) if (path := ".".join(names[:end])) in keys())


def _repeats(path: str, bad: set[str], resolved: Resolved) -> bool:
    inherits = keys()[path].inherits
    return inherits is not None and inherits.key in bad and resolved.sources[path] == f"inherits {inherits.key}"


def _problem(key: Key, resolved: Resolved) -> Problem:
    if key.path not in resolved.values:
        return Problem(key.path, "missing, and there is no default", f"give it, for example {key.path}={key.example}")
    value = resolved.values[key.path]
    written = resolved.moved.get(key.path, key.path)
    return Problem(written, f"{masked(value)!r} is not {expected(key)}", _fix(key, value))


def _fix(key: Key, value: object) -> str:
    if key.choices:
        suggestion = value_meant(key.path, str(value), key.allowed)
        return f"did you mean {suggestion}?" if suggestion else "choose one of these"
    if key.type_text.startswith("a string") and isinstance(value, bool | int | float):
        return f"""put it in quotes: '{key.path}="{value}"'"""
    if key.inherits:
        return f"leave it out to inherit {key.inherits.key}"
    return f"the default is {show(key.default)}" if not key.required else f"for example {key.example}"
