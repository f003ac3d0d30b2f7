"""The user's settings: the YAML file and the overrides, merged into one flat table of keys."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tether.config.adapters import take_from_adapters
from tether.config.keys import keys, mapping_key, sections, show
from tether.config.loading.asynchronous import translate_asynchronous
from tether.config.loading.compose import compose
from tether.config.loading.foreign_words import KEYS
from tether.config.loading.interpolation import interpolates
from tether.config.loading.overrides import Override, parse_overrides
from tether.config.loading.rlinf_marks import ENV_KEY, NOT_SUPPORTED, is_rlinf
from tether.config.loading.sft_names import full_name, is_fine_tuning, with_full_names
from tether.config.loading.typos import unknown_key
from tether.config.loading.yaml_file import MISSING, read_yaml
from tether.config.problems import ConfigError, Problem
from tether.config.schema.engine import STRATEGY
from tether.config.support.verl_keys import composed_files, is_unread_section, renamed, unread
from tether.integrations import integration

if TYPE_CHECKING:
    from tether.config.loading.imported import Imported

COMMAND_LINE = "command line"
MODEL_ENGINE = "model_engine"
PLACEHOLDER = "?"
"""Stands in for a missing required key while the other keys are checked."""
MISSING_ALLOWED = ("actor_rollout_ref.rollout.name",)
"""Keys whose value may be ???: verl prints them like this, and they have a default here."""


@dataclass(frozen=True)
class Setting:
    """A value set by the user."""

    value: object
    """The value as written, with interpolations as `${...}`."""
    source: str
    """The YAML file's name, or "command line"."""
    position: int
    """0 for the file, then 1, 2, ... along the command line; the last setting of a key wins."""
    written: str | None = None
    """The key as the user wrote it, if it was one of RLinf or of a newer verl."""


Settings = dict[str, Setting]
"""Settings by key: keys of the schema, and keys of verl that nothing reads."""


def read_settings(path: Path | None, overrides: Sequence[str | Override]) -> tuple[Settings, list[Problem], list[str]]:
    """Read the file, then apply the overrides. Unknown keys become problems and are omitted.

    With a file of RLinf, overrides in RLinf's keys apply to the file, and other overrides to its translation.

    Returns:
        The settings, problems, and notes.

    Raises:
        ConfigError: the file cannot be read.
    """
    settings: Settings = {}
    problems: list[Problem] = []
    notes: list[str] = []
    parsed, unreadable = parse_overrides(overrides)
    verl_files = composed_files() if path is not None and _may_be_shipped_by_verl(path) else {}
    shipped = verl_files.get(path.stem) if path is not None else None
    tree = shipped if shipped is not None else {} if path is None else read_yaml(path, verl_files)
    if is_fine_tuning(tree, parsed):
        tree = with_full_names(tree)
        parsed = [replace(override, path=full_name(override.path)) for override in parsed]
    if path is not None and is_rlinf(tree):  # checked before importing the translation, whose tables are slow to load
        imported: Imported = integration("rlinf", "importer").import_file(path, parsed)
        settings, parsed = _translated(imported, path.name), list(imported.other_overrides)
        problems += [*imported.refusals(), *imported.problems]
        notes += import_notes(imported, path)
    elif path is not None and shipped is not None:
        chosen = [item for name in shipped for item in _flatten(str(name), shipped[name])]
        sets = [f"{item[0]}={show(item[1])}" for item in chosen if not isinstance(item, Problem) and item[1] != {}]
        also = f", with {' and '.join(sets)}" if sets else ""
        notes.append(f"{path.stem} stands for verl's defaults{also}; tether config show prints each value")
        problems += _store(settings, chosen, path.stem, 0)
    elif path is not None:
        composed, list_problems = compose(path, tree, composed_files().get)
        problems += list_problems
        refused, parsed = _refused_in_translation(composed.pop(NOT_SUPPORTED, None), path, parsed)
        problems += refused
        items = [item for name, value in composed.items() for item in _flatten(name, value)]
        problems += _store(settings, items, path.name, 0)
    problems += unreadable
    for position, override in enumerate(parsed, start=1):
        problems += _apply(settings, override, position)
    _choose_engine(settings)
    take_from_adapters(settings)
    asynchronous, translated = translate_asynchronous(settings)
    problems += asynchronous
    notes += translated
    if ENV_KEY not in settings and any(problem.fix == f"did you mean {ENV_KEY}?" for problem in problems):
        # Otherwise the config would be checked as a text run, which requires other keys.
        settings[ENV_KEY] = Setting(PLACEHOLDER, COMMAND_LINE, 0)
    return settings, list(dict.fromkeys([*problems, *_missing_problems(settings)])), notes


def _missing_problems(settings: Settings) -> list[Problem]:
    """Return a problem for each key with a missing value, and replace the value so that other keys can be checked."""
    problems, embodied = [], ENV_KEY in settings  # text runs report a missing required key later
    for key in [key for key, setting in settings.items() if setting.value == MISSING]:
        setting = settings.pop(key)
        if key == ENV_KEY:
            fix = f"give it, for example {ENV_KEY}=CartPole-v1"
            problems.append(Problem(key, "missing: no simulator is named", fix))
            # Otherwise the config would be checked as a text run, which requires other keys.
            settings[key] = replace(setting, value=PLACEHOLDER)
        elif key in keys() and (embodied or not keys()[key].required) and key not in MISSING_ALLOWED:
            fix = f"give it; `tether config explain {key}` says what it takes"
            problems.append(Problem(key, f"{MISSING} stands for a value still to be given", fix))
    return problems


def _may_be_shipped_by_verl(path: Path) -> bool:
    """Whether a missing file may be one shipped by verl, whose main_ppo looks for it in a folder `config`."""
    return not path.is_file() and path.parent.name in ("", "config")


def _refused_in_translation(
    section: object, path: Path, overrides: Sequence[Override]
) -> tuple[list[Problem], list[Override]]:
    """Return problems of unsupported settings in a translated file that no override deletes, and other overrides."""
    refused = {f"{NOT_SUPPORTED}.{key}": str(why) for key, why in section.items()} if isinstance(section, dict) else {}
    deletions = [item for item in overrides if refused and item.delete and item.path in {NOT_SUPPORTED, *refused}]
    deleted = {item.path for item in deletions}
    problems = [
        Problem(key, why, f"to run without it, take the line out of {path.name}, or give ~{key}")
        for key, why in refused.items()
        if not deleted & {NOT_SUPPORTED, key}
    ]
    return problems, [item for item in overrides if item not in deletions]


def _translated(imported: Imported, source: str) -> Settings:
    settings: Settings = {}
    for key, value in imported.native.items():
        origin = imported.origins[key]
        settings[key] = Setting(value, f"{source}, as {origin}", 0, None if origin == key else origin)
    return settings


def import_notes(imported: Imported, path: Path) -> list[str]:
    """Return the notes on an imported file."""
    idle = sum(line.status == "no effect" for line in imported.lines)
    command = f"`tether config import-rlinf {shlex.quote(str(path))}`"
    notes = [f"{path.name} is RLinf's, and {idle} of its keys do nothing here: {command} lists them"]
    notes += imported.remarks()
    if imported.older_names:
        names = ", ".join(f"{old} (now {new})" for old, new in imported.older_names.items())
        notes.append(f"{path.name} has older names of RLinf's, which are read for one more release: {names}")
    if imported.left_out:
        left_out = ", ".join(imported.left_out)
        notes.append(f"another simulator, task or policy than that of {path.name}: its {left_out} are left out")
    return notes


Item = tuple[str, object, str | None]
"""A key, its value, and the key as written if it differs."""


def _flatten(path: str, value: object, written: str | None = None) -> Iterator[Item | Problem]:
    """Split a nested value along the schema; the value of a free mapping is not split."""
    if (name := renamed(path)) != path:
        yield from _flatten(name, value, path)
    elif path in keys():
        yield _grammar_problem(path, value) or (path, value, written)
    elif isinstance(value, dict) and (value or path in sections()):
        for name, inner in value.items():
            # Hydra's class marker sets nothing, and is common in configs that verl prints.
            if name != "_target_":
                yield from _flatten(f"{path}.{name}", inner, written and f"{written}.{name}")
    elif unread(path) is not None:
        yield _grammar_problem(path, value) or (path, value, written)
    elif value in (None, {}) and is_unread_section(path):
        return
    elif (owner := mapping_key(path)) is not None:
        what = f"is a part of {owner}, which a file gives as one mapping"
        yield Problem(written or path, what, f"write it below {owner}, or give {path}={show(value)} in the command")
    elif path not in sections():
        yield unknown_key(written or path)
    elif value is not None:
        yield _not_a_value(path, value)


def _not_a_value(section: str, value: object) -> Problem:
    suggestions = " or ".join(KEYS.get(section, ()))
    fix = f"did you mean {suggestions}?" if suggestions else f"see `tether config explain {section}`"
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


def _store(settings: Settings, items: Iterable[Item | Problem], source: str, position: int) -> list[Problem]:
    """Store items in `settings`, and return the problems."""
    problems: list[Problem] = []
    for item in items:
        if isinstance(item, Problem):
            problems.append(item)
            continue
        path, value, written = item
        # A config printed by verl contains both names of a renamed key, one of them null or interpolated.
        rival = settings[path].value if path in settings and settings[path].position == position == 0 else None
        if rival is None or interpolates(rival):
            if path not in keys():
                _remove_overlapping(settings, path)
            settings[path] = Setting(value, source, position, written)
        elif value is not None and value != rival and not interpolates(value):
            other = written or settings[path].written
            named = f"{other} is another name of the key" if other else "it is written twice"
            what = f"{show(value)} contradicts {show(rival)}; {named}"
            problems.append(Problem(path, what, f"keep {path}"))
    return problems


def _apply(settings: Settings, override: Override, position: int) -> list[Problem]:
    path = renamed(override.path)
    written = None if path == override.path else override.path
    owner = mapping_key(path)
    if owner is not None:
        return _apply_inside_mapping(
            settings, owner, path.removeprefix(owner + ".").split("."), override, written, position
        )
    if path in sections() and not override.delete and not isinstance(override.value, dict):
        problem = _not_a_value(path, override.value)
        hint = f"to choose a preset, write `- override {path}: {show(override.value)}` last in the file's defaults list"
        return [replace(problem, fix=f"{problem.fix}; {hint}") if isinstance(override.value, str) else problem]
    if not override.delete:
        items = _flatten(path, override.value, written)
        return _store(settings, (_merged_with_previous(settings, item) for item in items), COMMAND_LINE, position)
    if path not in keys() and path not in sections() and unread(path) is None and not is_unread_section(path):
        return [unknown_key(override.path)]
    current = settings[path].value if path in settings else keys()[path].default if path in keys() else None
    if override.value is not None and override.value != current:
        return [_not_its_value(override)]
    _remove(settings, path)
    return []


def _apply_inside_mapping(
    settings: Settings, owner: str, inner: list[str], override: Override, written: str | None, position: int
) -> list[Problem]:
    """Apply an override to an item of a free mapping."""
    old = settings[owner].value if owner in settings else {}
    if override.delete:
        current = _value_at(old, inner)
        if current is None:
            return [Problem(override.path, "is not set, so there is nothing to delete", "leave it out")]
        if override.value is not None and override.value != current:
            return [_not_its_value(override)]
        changed = _without(old, inner)
    else:
        try:
            changed = put(old, inner, override.value)
        except ConfigError as error:
            return [replace(problem, path=override.path) for problem in error.problems]
    return _store(settings, [_grammar_problem(owner, changed) or (owner, changed, written)], COMMAND_LINE, position)


def _not_its_value(override: Override) -> Problem:
    what = f"{show(override.value)} is not its value, so there is nothing to delete"
    return Problem(override.path, what, f"write ~{override.path}")


def _choose_engine(settings: Settings) -> None:
    """Translate verl's ``model_engine=megatron``, which selects the files of actor and critic, to the strategy keys."""
    chosen = settings.get(MODEL_ENGINE)
    if chosen is not None and chosen.value not in (None, "dp"):
        del settings[MODEL_ENGINE]
        settings.setdefault(STRATEGY, replace(chosen, written=MODEL_ENGINE))


def _remove(settings: Settings, path: str) -> None:
    """Remove a key, or all keys of a section."""
    for key in [key for key in settings if key == path or key.startswith(path + ".")]:
        del settings[key]


def _remove_overlapping(settings: Settings, path: str) -> None:
    """Remove settings that conflict with a key outside of the schema: those of keys above and below it."""
    _remove(settings, path)
    for end in [index for index, letter in enumerate(path) if letter == "."]:
        settings.pop(path[:end], None)


def put(mapping: object, path: Sequence[str], value: object) -> dict[str, object]:
    """Return a mapping with a value set at a path; as in Hydra, mappings are merged and other values replaced.

    Raises:
        ConfigError: the path has an index that a list does not have.
    """
    old = mapping if isinstance(mapping, dict) else {}
    try:
        return {**old, path[0]: _put(old.get(path[0]), path[1:], value)}
    except IndexError as error:
        what = f"is no index of the list, whose last index is {error}"
        raise ConfigError([Problem(".".join(path), what, "give the complete list")]) from error


def _put(old: object, path: Sequence[str], value: object) -> object:
    if not path:
        return _merged(old, value)
    first, *below = path
    if not isinstance(old, list):
        inner = old if isinstance(old, dict) else {}
        return {**inner, first: _put(inner.get(first), below, value)}
    if not first.isdecimal() or int(first) >= len(old):
        raise IndexError(len(old) - 1)
    return [_put(item, below, value) if index == int(first) else item for index, item in enumerate(old)]


def _merged_with_previous(settings: Settings, item: Item | Problem) -> Item | Problem:
    """Merge the value of a mapping key with its previous value."""
    if isinstance(item, Problem):
        return item
    path, value, written = item
    is_mapping = path in settings and path in keys() and keys()[path].is_mapping
    return (path, _merged(settings[path].value, value), written) if is_mapping else item


def _merged(old: object, new: object) -> object:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {name: _merged(old.get(name), value) for name, value in new.items()}


def _value_at(mapping: object, path: list[str]) -> object:
    """Return the value at a path; None if there is none."""
    for name in path:
        mapping = mapping.get(name) if isinstance(mapping, dict) else None
    return mapping


def _without(mapping: object, path: list[str]) -> dict[str, object]:
    old = mapping if isinstance(mapping, dict) else {}
    first, *below = path
    return old | {first: _without(old[first], below)} if below else {name: old[name] for name in old if name != first}
