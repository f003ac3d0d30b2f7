"""Reads the value of each key of an RLinf file; interpolations and RLinf's resolvers are resolved key by key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from tether.config.keys import show
from tether.config.loading.yaml_file import MISSING
from tether.config.problems import Problem
from tether.integrations.rlinf.rows import NoEffect, Table
from tether.types import JsonObject


def section_at(tree: JsonObject, path: str) -> JsonObject:
    """Return the section at a dotted path; empty if it is missing or not a section."""
    for name in path.split("."):
        inner = tree.get(name)
        tree = inner if isinstance(inner, dict) else {}
    return tree


def _number(value: object) -> float:
    # Python also multiplies strings: 8 times '8' would be '88888888'.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number; write it as one, without quotes")
    return value


def _not(value: object) -> bool:
    # In Python every non-empty string is true, including 'False'.
    if isinstance(value, str):
        raise ValueError(f"{value!r} is a string, neither true nor false; write it without quotes")
    return not value


RESOLVERS: Mapping[str, Callable[..., object]] = {
    "multiply": lambda first, second: _number(first) * _number(second),
    "int_div": lambda first, second: _number(first) // _number(second),
    "subtract": lambda first, second: _number(first) - _number(second),
    "not": _not,
    "torch.dtype": str,
    "now": lambda form: datetime.now().strftime(form),
}
"""The resolvers that RLinf registers, and Hydra's `now`; dtypes stay names, because configurations do not import
torch."""


@contextmanager
def resolvers() -> Iterator[None]:
    """Register RLinf's resolvers inside the context; existing resolvers with the same names are not replaced."""
    added = [name for name in RESOLVERS if not OmegaConf.has_resolver(name)]
    for name in added:
        OmegaConf.register_new_resolver(name, RESOLVERS[name])
    try:
        yield
    finally:
        for name in added:
            OmegaConf.clear_resolver(name)


def values_of(tree: Mapping[str, object], table: Table) -> tuple[dict[str, object], list[Problem]]:
    """Return all values by dotted path, and problems with values that cannot be resolved.

    A mapping with a row of its own, or a section with a row `section.*`, is one value. Keys whose values have no effect
    are not resolved.
    """
    values: dict[str, object] = {}
    problems: list[Problem] = []
    with resolvers():
        for item in _walk(OmegaConf.create(dict(tree)), "", table):
            if isinstance(item, Problem):
                problems.append(item)
            else:
                values[item[0]] = item[1]
    return values, problems


def _walk(section: DictConfig, prefix: str, table: Table) -> Iterator[tuple[str, object] | Problem]:
    written = OmegaConf.to_container(section, resolve=False)
    assert isinstance(written, dict)
    for name in section:
        path = prefix + str(name)
        if _is_one(path, table):
            yield f"{path}.*", written[name]
            continue
        if isinstance(table.get(path), NoEffect):
            yield path, written[name]
            continue
        try:
            value = section[name]
            if isinstance(value, DictConfig) and path not in table and (value or _is_section(path, table)):
                yield from _walk(value, f"{path}.", table)
            elif value is None and path not in table and _is_section(path, table):
                continue  # a section without any keys
            else:
                plain = OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value
                yield (path, plain) if path in table or not _is_section(path, table) else _no_section(path, plain)
        except MissingMandatoryValue:
            yield Problem(path, f"{MISSING} stands for a value still to be given", f"give it, for example {path}=...")
        except OmegaConfBaseException as error:
            yield _unresolved(path, written[name], str(error).splitlines()[0])


def _unresolved(path: str, written: object, why: str) -> Problem:
    kind, in_resolver, refused = why.partition(" raised while resolving interpolation: ")
    if in_resolver and kind != "KeyError":  # a KeyError means that an environment variable is not set
        return Problem(path, f"{written} does not resolve ({refused})", "correct its arguments")
    return Problem(path, f"does not resolve ({why})", "name an existing key, or set the environment variable")


def _no_section(path: str, value: object) -> Problem:
    what = f"{show(value)} stands where a section of keys belongs"
    return Problem(path, what, "write its keys below it, or leave it out")


def _is_section(path: str, table: Table) -> bool:
    """Whether the table has keys below this path."""
    return any(key.startswith(f"{path}.") for key in table)


def _is_one(path: str, table: Table) -> bool:
    """Whether the table has one row for a complete section."""
    return f"{path}.*" in table and not any(key.startswith(f"{path}.") and key != f"{path}.*" for key in table)
