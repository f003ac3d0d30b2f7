"""The user's settings: the YAML file and the overrides, as one flat table of keys."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tether.config.importers.rlinf.marks import ENV_KEY, NOT_SUPPORTED, is_rlinf
from tether.config.keys import keys, sections, show
from tether.config.loading.asynchronous import translate_asynchronous
from tether.config.loading.compose import compose
from tether.config.loading.foreign_words import KEYS
from tether.config.loading.interpolation import interpolates
from tether.config.loading.overrides import Override, parse_overrides
from tether.config.loading.typos import unknown_key
from tether.config.loading.yaml_file import MISSING, read_yaml
from tether.config.problems import ConfigError, Problem
from tether.config.schema.engine import STRATEGY
from tether.config.support.verl_keys import composed_files, is_unread_section, renamed, unread

if TYPE_CHECKING:
    from tether.config.importers.rlinf.importer import Imported

COMMAND_LINE = "command line"
MODEL_ENGINE = "model_engine"
STAND_IN = "?"
"""Value of a required key while the rest of a config without it is checked."""
LEFT_OPEN = ("actor_rollout_ref.rollout.name",)
"""Keys that are ??? in configurations that verl printed, and have a default here."""


@dataclass(frozen=True)
class Setting:
    """A value that the user gave."""

    value: object
    """As written: interpolations stand as `${...}`."""
    source: str
    """The YAML file's name, or "command line"."""
    position: int
    """0 for the file, then 1, 2, ... along the command line: the later one counts."""
    written: str | None = None
    """The key as the user wrote it, where that is one of RLinf's or of a newer verl."""


Given = dict[str, Setting]
"""Keys of the schema, and those of verl that nothing reads."""


def read_given(path: Path | None, overrides: Sequence[str | Override]) -> tuple[Given, list[Problem], list[str]]:
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
    of_verl = composed_files() if path is not None and _may_be_verls(path) else {}
    shipped = of_verl.get(path.stem) if path is not None else None
    tree = shipped if shipped is not None else {} if path is None else read_yaml(path, of_verl)
    if path is not None and is_rlinf(tree):  # imported here: its tables take a moment to load
        imported = importlib.import_module("tether.config.importers.rlinf.importer").import_file(path, parsed)
        given, parsed = _translated(imported, path.name), list(imported.rest)
        problems += [*imported.refusals(), *imported.problems]
        notes += _import_notes(imported, path)
    elif path is not None and shipped is not None:
        chosen = [item for name in shipped for item in _flatten(str(name), shipped[name])]
        sets = [f"{item[0]}={show(item[1])}" for item in chosen if not isinstance(item, Problem) and item[1] != {}]
        also = f", with {' and '.join(sets)}" if sets else ""
        notes.append(f"{path.stem} stands for verl's defaults{also}; tether config show prints each value")
        problems += _store(given, chosen, path.stem, 0)
    elif path is not None:
        composed, found = compose(path, tree, composed_files().get)
        problems += found
        refused, parsed = _refused_in_translation(composed.pop(NOT_SUPPORTED, None), path, parsed)
        problems += refused
        items = [item for name, value in composed.items() for item in _flatten(name, value)]
        problems += _store(given, items, path.name, 0)
    problems += unreadable
    for position, override in enumerate(parsed, start=1):
        problems += _apply(given, override, position)
    _choose_engine(given)
    asynchronous, translated = translate_asynchronous(given)
    problems += asynchronous
    notes += translated
    if ENV_KEY not in given and any(problem.fix == f"did you mean {ENV_KEY}?" for problem in problems):
        given[ENV_KEY] = Setting(STAND_IN, COMMAND_LINE, 0)  # it is no text run, which would lack other keys
    return given, list(dict.fromkeys([*problems, *_still_to_give(given)])), notes


def _still_to_give(given: Given) -> list[Problem]:
    """Problems of keys without a value yet; the rest of the configuration is then checked without them."""
    problems, embodied = [], ENV_KEY in given  # a text run without a required key is refused later
    for key in [key for key, setting in given.items() if setting.value == MISSING]:
        setting = given.pop(key)
        if key == ENV_KEY:
            fix = f"give it, for example {ENV_KEY}=CartPole-v1"
            problems.append(Problem(key, "missing: no simulator is named", fix))
            given[key] = replace(setting, value=STAND_IN)  # it is no text run, which would lack other keys
        elif key in keys() and (embodied or not keys()[key].required) and key not in LEFT_OPEN:
            fix = f"give it; `tether config explain {key}` says what it takes"
            problems.append(Problem(key, f"{MISSING} stands for a value still to be given", fix))
    return problems


def _may_be_verls(path: Path) -> bool:
    """Whether a missing file may stand for one of verl's own, which its main_ppo looks up in a folder `config`."""
    return not path.is_file() and path.parent.name in ("", "config")


def _refused_in_translation(
    section: object, path: Path, overrides: Sequence[Override]
) -> tuple[list[Problem], list[Override]]:
    """Settings of RLinf's file that the translated file does without and that no override takes out; the others."""
    refused = {f"{NOT_SUPPORTED}.{key}": str(why) for key, why in section.items()} if isinstance(section, dict) else {}
    freeing = [item for item in overrides if refused and item.delete and item.path in {NOT_SUPPORTED, *refused}]
    freed = {item.path for item in freeing}
    problems = [
        Problem(key, why, f"to run without it, take the line out of {path.name}, or give ~{key}")
        for key, why in refused.items()
        if not freed & {NOT_SUPPORTED, key}
    ]
    return problems, [item for item in overrides if item not in freeing]


def _translated(imported: Imported, source: str) -> Given:
    given: Given = {}
    for key, value in imported.native.items():
        origin = imported.origins[key]
        given[key] = Setting(value, f"{source}, as {origin}", 0, None if origin == key else origin)
    return given


def _import_notes(imported: Imported, path: Path) -> list[str]:
    idle = sum(line.status == "no effect" for line in imported.lines)
    command = f"`tether config import-rlinf {path}`"
    notes = [f"{path.name} is RLinf's, and {idle} of its keys do nothing here: {command} lists them"]
    notes += imported.remarks()
    if imported.left_out:
        left_out = ", ".join(imported.left_out)
        notes.append(f"another simulator, task or policy than that of {path.name}: its {left_out} are left out")
    return notes


Item = tuple[str, object, str | None]
"""A key, its value, and the key as it was written where that is another one."""


def _flatten(path: str, value: object, written: str | None = None) -> Iterator[Item | Problem]:
    """Split a nested value along the schema; what lies below a mapping key stays one value."""
    if (name := renamed(path)) != path:
        yield from _flatten(name, value, path)
    elif path in keys():
        yield _grammar_problem(path, value) or (path, value, written)
    elif isinstance(value, dict) and (value or path in sections()):
        for name, inner in value.items():
            # Hydra's class marker, which verl's printed configs are full of; it sets nothing.
            if name != "_target_":
                yield from _flatten(f"{path}.{name}", inner, written and f"{written}.{name}")
    elif unread(path) is not None:
        yield _grammar_problem(path, value) or (path, value, written)
    elif value in (None, {}) and is_unread_section(path):
        return
    elif (owner := _mapping_key(path)) is not None:
        what = f"is a part of {owner}, which a file gives as one mapping"
        yield Problem(written or path, what, f"write it below {owner}, or give {path}={show(value)} in the command")
    elif path not in sections():
        yield unknown_key(written or path)
    elif value is not None:
        yield _not_a_value(path, value)


def _not_a_value(section: str, value: object) -> Problem:
    meant = " or ".join(KEYS.get(section, ()))
    fix = f"did you mean {meant}?" if meant else f"see `tether config explain {section}`"
    return Problem(section, f"is a section, which cannot be {show(value)}", fix)


def _grammar_problem(path: str, value: object) -> Problem | None:
    if not isinstance(value, dict | list) and not interpolates(value):
        return None
    try:
        OmegaConf.create([value])
    except OmegaConfBaseException as error:
        what = f"{show(value)} cannot be read ({str(error).splitlines()[0]})"
        fix = r"close the ${...}, or write \${ for the characters themselves" if interpolates(value) else "change it"
        return Problem(path, what, fix)
    return None


def _store(given: Given, items: Iterable[Item | Problem], source: str, position: int) -> list[Problem]:
    """Enter items into `given`; returns the problems among them."""
    problems: list[Problem] = []
    for item in items:
        if isinstance(item, Problem):
            problems.append(item)
            continue
        path, value, written = item
        # A file that verl printed has both names of a renamed key, one of them null or interpolated.
        rival = given[path].value if path in given and given[path].position == position == 0 else None
        if rival is None or interpolates(rival):
            if path not in keys():
                _make_room(given, path)
            given[path] = Setting(value, source, position, written)
        elif value is not None and value != rival and not interpolates(value):
            other = written or given[path].written
            named = f"{other} is another name of the key" if other else "it is written twice"
            what = f"{show(value)} contradicts {show(rival)}; {named}"
            problems.append(Problem(path, what, f"keep {path}"))
    return problems


def _apply(given: Given, override: Override, position: int) -> list[Problem]:
    path = renamed(override.path)
    written = None if path == override.path else override.path
    owner = _mapping_key(path)
    if owner is not None:
        return _apply_within(given, owner, path.removeprefix(owner + ".").split("."), override, written, position)
    if path in sections() and not override.delete and not isinstance(override.value, dict):
        problem = _not_a_value(path, override.value)
        hint = f"to choose a preset, write `- override {path}: {show(override.value)}` last in the file's defaults list"
        return [replace(problem, fix=f"{problem.fix}; {hint}") if isinstance(override.value, str) else problem]
    if not override.delete:
        items = _flatten(path, override.value, written)
        return _store(given, (_over(given, item) for item in items), COMMAND_LINE, position)
    if path not in keys() and path not in sections() and unread(path) is None and not is_unread_section(path):
        return [unknown_key(override.path)]
    held = given[path].value if path in given else keys()[path].default if path in keys() else None
    if override.value is not None and override.value != held:
        return [_not_its_value(override)]
    _forget(given, path)
    return []


def _apply_within(
    given: Given, owner: str, inner: list[str], override: Override, written: str | None, position: int
) -> list[Problem]:
    """Change what a free mapping holds."""
    old = given[owner].value if owner in given else {}
    if override.delete:
        held = _at(old, inner)
        if held is None:
            return [Problem(override.path, "is not there, so that there is nothing to take out", "leave it out")]
        if override.value is not None and override.value != held:
            return [_not_its_value(override)]
        changed = _drop(old, inner)
    else:
        try:
            changed = put(old, inner, override.value)
        except ConfigError as error:
            return [replace(problem, path=override.path) for problem in error.problems]
    return _store(given, [_grammar_problem(owner, changed) or (owner, changed, written)], COMMAND_LINE, position)


def _not_its_value(override: Override) -> Problem:
    what = f"{show(override.value)} is not its value, so that there is nothing to take out"
    return Problem(override.path, what, f"write ~{override.path}")


def _choose_engine(given: Given) -> None:
    """verl's ``model_engine=megatron`` chooses the files of actor and critic, and those say the strategy."""
    chosen = given.get(MODEL_ENGINE)
    if chosen is not None and chosen.value not in (None, "dp"):
        del given[MODEL_ENGINE]
        given.setdefault(STRATEGY, replace(chosen, written=MODEL_ENGINE))


def _forget(given: Given, path: str) -> None:
    """Take out a key, or a section with all of its keys."""
    for key in [key for key in given if key == path or key.startswith(path + ".")]:
        del given[key]


def _make_room(given: Given, path: str) -> None:
    """Take out what a key without a schema replaces: the value that it was a part of, and its own parts."""
    _forget(given, path)
    for end in [at for at, letter in enumerate(path) if letter == "."]:
        given.pop(path[:end], None)


def _mapping_key(path: str) -> str | None:
    """The free mapping that `path` points into, for example `data.apply_chat_template_kwargs`."""
    parts = path.split(".")
    prefixes = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((prefix for prefix in prefixes if prefix in keys() and keys()[prefix].is_mapping), None)


def put(mapping: object, path: Sequence[str], value: object) -> dict[str, object]:
    """A mapping with a value at a path, as Hydra has it: mappings are merged, everything else is replaced.

    Raises:
        ConfigError: the path leads to a place in a list that is not there.
    """
    old = mapping if isinstance(mapping, dict) else {}
    try:
        return {**old, path[0]: _put(old.get(path[0]), path[1:], value)}
    except IndexError as error:
        what = f"names no place of the list that is there, whose last is {error}"
        raise ConfigError([Problem(".".join(path), what, "give the whole list")]) from error


def _put(old: object, path: Sequence[str], value: object) -> object:
    if not path:
        return _merged(old, value)
    first, *rest = path
    if not isinstance(old, list):
        inner = old if isinstance(old, dict) else {}
        return {**inner, first: _put(inner.get(first), rest, value)}
    if not first.isdecimal() or int(first) >= len(old):
        raise IndexError(len(old) - 1)
    return [_put(item, rest, value) if at == int(first) else item for at, item in enumerate(old)]


def _over(given: Given, item: Item | Problem) -> Item | Problem:
    """A mapping with what was given of it before."""
    if isinstance(item, Problem):
        return item
    path, value, written = item
    is_mapping = path in given and path in keys() and keys()[path].is_mapping
    return (path, _merged(given[path].value, value), written) if is_mapping else item


def _merged(old: object, new: object) -> object:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {name: _merged(old.get(name), value) for name, value in new.items()}


def _at(mapping: object, path: list[str]) -> object:
    """The value at a path; None if there is none."""
    for name in path:
        mapping = mapping.get(name) if isinstance(mapping, dict) else None
    return mapping


def _drop(mapping: object, path: list[str]) -> dict[str, object]:
    old = mapping if isinstance(mapping, dict) else {}
    first, *rest = path
    return old | {first: _drop(old[first], rest)} if rest else {name: old[name] for name in old if name != first}
