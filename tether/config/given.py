"""What the user gave: the YAML file and the overrides, as one flat table of the schema's keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tether.config.interpolation import interpolates
from tether.config.keys import keys, sections, show
from tether.config.overrides import Override, parse_overrides
from tether.config.problems import Problem
from tether.config.rlinf.importer import Imported, import_file, is_rlinf
from tether.config.suggest import unknown_key
from tether.config.yaml_file import read_yaml

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Setting:
    """A value that the user gave."""

    value: Any
    """As written: interpolations stand as `${...}`."""
    source: str
    """The YAML file's name, or "command line"."""
    position: int
    """0 for the file, then 1, 2, ... along the command line: the later one counts."""
    written: str | None = None
    """The key as the user wrote it, where that is one of RLinf's."""


Given = dict[str, Setting]


def read_given(path: Path | None, overrides: Sequence[str]) -> tuple[Given, list[Problem], list[str]]:
    """Read the file, then the overrides over it. Unknown keys become problems and are left out.

    Over a file of RLinf, overrides in RLinf's keys change the file; the others go over what it is translated to.

    Returns:
        What was given, what is wrong with it, and notes.

    Raises:
        ConfigError: the file cannot be read at all.
    """
    given: Given = {}
    problems: list[Problem] = []
    notes: list[str] = []
    parsed, unreadable = parse_overrides(overrides)
    tree = {} if path is None else read_yaml(path)
    if path is not None and is_rlinf(tree):
        imported = import_file(path, parsed)
        given, parsed = _translated(imported, path.name), list(imported.rest)
        problems += [*imported.problems, *imported.refusals()]
        notes.append(_import_note(imported, path))
    elif path is not None:
        items = [item for name, value in tree.items() for item in _flatten(str(name), value)]
        problems += _store(given, items, path.name, 0)
    problems += unreadable
    for position, override in enumerate(parsed, start=1):
        problems += _apply(given, override, position)
    return given, problems, notes


def _translated(imported: Imported, source: str) -> Given:
    given: Given = {}
    for key, value in imported.native.items():
        origin = imported.origins[key]
        given[key] = Setting(value, f"{source}, as {origin}", 0, None if origin == key else origin)
    return given


def _import_note(imported: Imported, path: Path) -> str:
    idle = sum(line.status == "no effect" for line in imported.lines)
    command = f"`tether config import-rlinf {path}`"
    return f"{path.name} is RLinf's, and {idle} of its keys do nothing here: {command} lists them"


def _flatten(path: str, value: Any) -> Iterator[tuple[str, Any] | Problem]:
    """Split a nested value along the schema; what lies below a mapping key stays one value."""
    if path in keys():
        # "???" is OmegaConf's word for a value that is still to be given.
        if value != "???":
            yield _grammar_problem(path, value) or (path, value)
    elif isinstance(value, dict) and (value or path in sections()):
        for name, inner in value.items():
            # Hydra's class marker, which verl's printed configs are full of; it sets nothing.
            if name != "_target_":
                yield from _flatten(f"{path}.{name}", inner)
    elif path not in sections():
        yield unknown_key(path)
    elif value is not None:
        yield _not_a_value(path, value)


def _not_a_value(section: str, value: Any) -> Problem:
    return Problem(section, f"is a section, which cannot be {show(value)}", f"see `tether config explain {section}`")


def _grammar_problem(path: str, value: Any) -> Problem | None:
    if not interpolates(value):
        return None
    try:
        OmegaConf.create([value])
    except OmegaConfBaseException as error:
        what = f"{value!r} cannot be read ({str(error).splitlines()[0]})"
        return Problem(path, what, r"close the ${...}, or write \${ for the characters themselves")
    return None


def _store(given: Given, items: Sequence[tuple[str, Any] | Problem], source: str, position: int) -> list[Problem]:
    """Enter items into `given`; returns the problems among them."""
    given.update({item[0]: Setting(item[1], source, position) for item in items if not isinstance(item, Problem)})
    return [item for item in items if isinstance(item, Problem)]


def _apply(given: Given, override: Override, position: int) -> list[Problem]:
    owner = _mapping_key(override.path)
    if owner is not None:
        inner = override.path.removeprefix(owner + ".").split(".")
        old = given[owner].value if owner in given else {}
        changed = _drop(old, inner) if override.delete else _put(old, inner, override.value)
        return _store(given, [(owner, changed)], COMMAND_LINE, position)
    if override.path in sections() and not override.delete and not isinstance(override.value, dict):
        return [_not_a_value(override.path, override.value)]
    if not override.delete:
        return _store(given, list(_flatten(override.path, override.value)), COMMAND_LINE, position)
    if override.path not in keys() and override.path not in sections():
        return [unknown_key(override.path)]
    for key in [key for key in given if key == override.path or key.startswith(override.path + ".")]:
        del given[key]
    return []


def _mapping_key(path: str) -> str | None:
    """The free mapping that `path` points into, for example `data.apply_chat_template_kwargs`."""
    parts = path.split(".")
    prefixes = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((prefix for prefix in prefixes if prefix in keys() and keys()[prefix].is_mapping), None)


def _put(mapping: Any, path: list[str], value: Any) -> dict[str, Any]:
    old = mapping if isinstance(mapping, dict) else {}
    first, *rest = path
    return {**old, first: _put(old.get(first), rest, value) if rest else value}


def _drop(mapping: Any, path: list[str]) -> dict[str, Any]:
    old = mapping if isinstance(mapping, dict) else {}
    first, *rest = path
    if rest:
        return {**old, first: _drop(old.get(first), rest)}
    return {name: value for name, value in old.items() if name != first}
