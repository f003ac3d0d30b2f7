"""Every key of an RLinf file with its value: interpolations and RLinf's resolvers resolved, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from tether.config.importers.rlinf.rows import NoEffect, Table
from tether.config.loading.yaml_file import MISSING
from tether.config.problems import Problem

RESOLVERS: Mapping[str, Callable[..., object]] = {
    "multiply": lambda left, right: left * right,
    "int_div": lambda left, right: left // right,
    "subtract": lambda left, right: left - right,
    "not": lambda value: not value,
    "torch.dtype": str,
    "now": lambda form: datetime.now().strftime(form),
}
"""The resolvers that RLinf registers, and Hydra's `now`; a dtype stays its name, since a config imports no torch."""


@contextmanager
def resolvers() -> Iterator[None]:
    """Register RLinf's resolvers for the duration of a block; those of the same name that exist already stay."""
    added = [name for name in RESOLVERS if not OmegaConf.has_resolver(name)]
    for name in added:
        OmegaConf.register_new_resolver(name, RESOLVERS[name])
    try:
        yield
    finally:
        for name in added:
            OmegaConf.clear_resolver(name)


def values_of(tree: Mapping[str, object], table: Table) -> tuple[dict[str, object], list[Problem]]:
    """Every key by its dotted path; a mapping with a row of its own is one value, and a section, too: `section.*`.

    Keys whose value does not matter are not resolved. A value that does not resolve is a problem.
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
                continue  # a section of which all lines are gone
            else:
                yield path, OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value
        except MissingMandatoryValue:
            yield Problem(path, f"{MISSING} stands for a value still to be given", f"give it, for example {path}=...")
        except OmegaConfBaseException as error:
            what = f"does not resolve ({str(error).splitlines()[0]})"
            yield Problem(path, what, "name an existing key, or set the environment variable")


def _is_section(path: str, table: Table) -> bool:
    """Whether the table has keys below."""
    return any(key.startswith(f"{path}.") for key in table)


def _is_one(path: str, table: Table) -> bool:
    """Whether the table speaks of a whole section at once."""
    return f"{path}.*" in table and not any(key.startswith(f"{path}.") and key != f"{path}.*" for key in table)
