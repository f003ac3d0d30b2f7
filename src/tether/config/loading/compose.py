"""Composition of preset files by Hydra's `defaults:` list; the file's own keys override those of its presets.

An entry is `group/name@where` or `{group@where: name}`, relative to the group of its file unless it begins with a
slash. Without `@where`, a preset is mounted at the package in its `# @package` line, else at its group, or at the top
if it has no group. With `optional` before a group its preset may be missing; with `override` its choice replaces the
one of another list. Presets are searched for in the folder of the file, then in `hydra.searchpath`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tether.config.keys import show
from tether.config.loading.defaults_list import GROUP, HERE, SELF, TOP, Line, line_problem, read_lines, read_package
from tether.config.loading.yaml_file import MISSING, read_yaml
from tether.config.problems import ConfigError, Problem

BuiltIn = Callable[[str], Mapping[object, object] | None]
Layer = dict[str, object]
"""The keys of a file as a tree from the top level."""


def compose(path: Path, tree: Mapping[object, object], built_in: BuiltIn) -> tuple[Layer, list[Problem]]:
    """Merge a file with its presets.

    Args:
        path: the file, whose folder has its presets.
        tree: its content, including `defaults` and `hydra`.
        built_in: returns the content of a preset, by group and name, that may be missing; None if it may not.

    Returns:
        The keys, including `hydra` without its `searchpath`, and problems of the lists.

    Raises:
        ConfigError: a preset is not a YAML file, or has a list where another has a section.
    """
    problems: list[Problem] = []
    hydra = tree.get("hydra")
    hydra_settings = _without(hydra, "searchpath") if isinstance(hydra, dict) else hydra
    own_keys = _without(tree, "hydra") | ({"hydra": hydra_settings} if hydra_settings else {})
    top = _File(path.stem, "", _declared_mount(path, path.stem, problems) or "")
    composition = _Composition((path.parent, *_search_path(hydra, problems)), built_in, problems)
    slots = composition.add_file(own_keys, top, (path.stem,))
    composition.add_unused_overrides()
    return _merged(path, [layer for slot in slots for layer in slot]), problems


@dataclass(frozen=True)
class _File:
    """A file of the composition."""

    name: str
    """Group and name, such as `env/libero_10`."""
    group: str
    """Group to which the entries of its list are relative."""
    where: str
    """Dotted key below which its keys are mounted; empty for the top level."""


Slot = list[Layer]
"""The layers of one line, in the order of lines; an override may fill it later."""


@dataclass
class _Override:
    line: Line
    file: _File
    slot: Slot
    is_used: bool = False


@dataclass
class _Composition:
    folders: Sequence[Path]
    built_in: BuiltIn
    problems: list[Problem]
    overrides: dict[str, _Override] = field(default_factory=dict)
    """Group, with its @where -> the first line that overrides its choice."""
    chosen: dict[str, object] = field(default_factory=dict)
    """Group, with its @where -> the choice so far."""
    has_built_in: bool = False
    """Whether a built-in preset was added, whose own list is not available for overrides."""

    def add_file(self, tree: Mapping[object, object], file: _File, stack: tuple[str, ...]) -> list[Slot]:
        """Add a file's presets and its own keys, and return their slots in the order of its lines.

        As in Hydra, lines are followed from the last to the first, so that overrides of a preset apply to the lines
        above it, and choices with `${...}` come after all others of the list.
        """
        lines = read_lines(tree, file.name, self.problems)
        slots: list[list[Slot]] = [[[]] for _ in lines]
        for line, (slot,) in zip(lines, slots, strict=True):
            if line.is_override:
                self._override(line, file, slot)
            elif line.path == SELF:
                slot.append(_mounted(_without(tree, "defaults"), file.where))
        interpolated: list[tuple[int, Line]] = []
        for index in reversed(range(len(lines))):
            if lines[index].path == SELF or lines[index].is_override:
                continue
            line = self._with_override(lines[index], file)
            if line.is_interpolated:
                interpolated.append((index, line))
            else:
                slots[index] = self._follow(line, file, stack)
        for index, line in interpolated:
            slots[index] = self._follow(self._resolved(line, file), file, stack)
        return [slot for line_slots in slots for slot in line_slots]

    def add_unused_overrides(self) -> None:
        """Add the overrides of choices in built-in presets; without such presets an unused override is a problem."""
        while unused := [override for override in self.overrides.values() if not override.is_used]:
            for override in unused:
                override.is_used = True
                line, file = override.line, override.file
                if self.has_built_in:
                    override.slot += [layer for slot in self._follow(line, file, ()) for layer in slot]
                else:
                    what = f"replaces no choice: nothing else chooses {_key(line, file)}"
                    self.problems.append(line_problem(line, file.name, what, "write it without override"))

    def _override(self, line: Line, file: _File, slot: Slot) -> None:
        key = _key(line, file)
        if not key.startswith("hydra/"):  # Hydra's own groups, such as its logging
            self.overrides.setdefault(key, _Override(line, file, slot))

    def _with_override(self, line: Line, file: _File) -> Line:
        override = self.overrides.get(_key(line, file)) if line.is_group else None
        if override is None:
            return line
        override.is_used = True
        return replace(line, choice=override.line.choice)

    def _resolved(self, line: Line, file: _File) -> Line:
        """Return the line with its `${...}` resolved from earlier choices; its choice is None if that fails."""
        try:
            name = OmegaConf.create({**self.chosen, "_": line.choice or line.path})["_"]
        except OmegaConfBaseException:
            name = None
        if isinstance(name, str):
            return replace(line, choice=name) if line.is_group else replace(line, path=name)
        fix = f"name a group that has a choice here ({', '.join(self.chosen) or 'there is none'})"
        self.problems.append(line_problem(line, file.name, "has ${...} that resolves to no name", fix))
        return replace(line, is_group=True, choice=None)

    def _follow(self, line: Line, file: _File, stack: tuple[str, ...]) -> list[Slot]:
        """Return the slots of the presets that a line names."""
        if line.is_group and not isinstance(line.choice, list):
            key = _key(line, file)
            if self.chosen.get(key, line.choice) != line.choice or (line.choice and key in self.chosen):
                fix = f"keep one of the two, or write override {key}: NAME at the end of the list to replace it"
                self.problems.append(line_problem(line, file.name, f"is the second line that chooses {key}", fix))
                return []
            self.chosen[key] = line.choice
        return [slot for entry in line.named() for slot in self._preset(entry, file, stack)]

    def _preset(self, line: Line, parent: _File, stack: tuple[str, ...]) -> list[Slot]:
        written = f"{line.path}/{line.choice}" if line.is_group else line.path
        name = _absolute_name(written, parent).removesuffix(".yaml")
        file = _File(
            name,
            _absolute_name(line.path, parent) if line.is_group else posixpath.dirname(name),
            _mount_of(line, parent),
        )
        path = next((candidate for folder in self.folders if (candidate := folder / f"{name}.yaml").is_file()), None)
        shipped = self.built_in(name) if path is None or name in stack else None
        if shipped is not None:
            self.has_built_in = True
            at_top = shipped.get(TOP)
            return [[at_top if isinstance(at_top, dict) else _mounted(shipped, file.where)]] if shipped else []
        if path is None:
            self.problems += [] if line.is_optional else [_missing(line, parent, file, self.folders)]
            return []
        if name in stack:
            self.problems.append(Problem("defaults", f"{name} includes itself", "take the entry out"))
            return []
        tree = read_yaml(path)
        if line.package is None and (package := _declared_mount(path, name, self.problems)) is not None:
            file = replace(file, where=package)
        hydra = tree.get("hydra")
        if not file.where and isinstance(hydra, dict) and "searchpath" in hydra:
            fix = "write it in the run's own file"
            self.problems.append(Problem("hydra.searchpath", f"is not read from a preset ({path})", fix))
            tree["hydra"] = _without(hydra, "searchpath")
        return self.add_file(tree, file, (*stack, name))


def _absolute_name(path: str, parent: _File) -> str:
    """Return the name of a group or preset relative to the top folder; in a list it may be relative to the file."""
    return posixpath.normpath(posixpath.join("/", parent.group, path))[1:]


def _key(line: Line, parent: _File) -> str:
    """Return the group of a line as an ``override`` line in the top folder names it."""
    group, where = _absolute_name(line.path, parent), _mount_of(line, parent)
    return group if where == group.replace("/", ".") else f"{group}@{where or TOP}"


def _mount_of(line: Line, parent: _File) -> str:
    """Return the key below which a line mounts a preset without a `# @package` line."""
    group = line.path if line.is_group else posixpath.dirname(line.path)
    package = group.strip("/").replace("/", ".") if line.package is None else line.package
    return _mount_point(package, _absolute_name(group, parent), parent.where)


def _mount_point(package: str, group: str, where: str) -> str:
    inner = "" if package == HERE else package
    if GROUP in inner:
        inner = f"{TOP}.{inner.replace(GROUP, group.replace('/', '.'))}"
    return f"{where}.{inner}".rpartition(TOP)[2].strip(".")


def _declared_mount(path: Path, name: str, problems: list[Problem]) -> str | None:
    """Return the key of a file's `# @package` line; None without one."""
    package = read_package(path.read_text(encoding="utf-8"), name, problems)
    return package and _mount_point(package, "", "")


def _without(tree: Mapping[object, object], key: str) -> dict[object, object]:
    return {name: value for name, value in tree.items() if name != key}


def _mounted(tree: Mapping[object, object], where: str) -> Layer:
    mounted = {str(name): value for name, value in tree.items()}
    for name in reversed(where.split(".") if where else []):
        mounted = {name: mounted}
    return mounted


def _merged(path: Path, layers: Sequence[Layer]) -> Layer:
    if len(layers) == 1:
        return layers[0]
    try:
        merged = OmegaConf.to_container(OmegaConf.merge({}, *layers), resolve=False)
    except OmegaConfBaseException as error:
        clashes = (_clash(one, other) for one, other in combinations(layers, 2))
        key = next(filter(None, clashes), "a key")
        what = f"{key} is a list in one of the file and its presets, and a section of keys in another"
        raise ConfigError([Problem(str(path), what, "write the same in both")]) from error
    assert isinstance(merged, dict)
    return {str(name): value for name, value in merged.items()}


def _clash(one: Layer, other: Layer) -> str | None:
    """Return the first key that is a list in one tree and a section in the other; None if there is none."""
    for name in one.keys() & other.keys():
        pair = one[name], other[name]
        if isinstance(pair[0], dict) and isinstance(pair[1], dict):
            if inner := _clash(pair[0], pair[1]):
                return f"{name}.{inner}"
        elif {dict, list} == {type(value) for value in pair}:
            return str(name)
    return None


def _search_path(hydra: object, problems: list[Problem]) -> list[Path]:
    """Return the folders of `hydra.searchpath`, without those that name an unset environment variable."""
    entries = (hydra.get("searchpath") or []) if isinstance(hydra, dict) else []
    if not isinstance(entries, list) or not all(isinstance(item, str) for item in entries):
        what = f"{show(entries)} is no list of folders"
        problems.append(Problem("hydra.searchpath", what, "write it as [file://FOLDER]"))
        return []
    folders: list[Path] = []
    for item in entries:
        try:
            (text,) = OmegaConf.create([item])
        except OmegaConfBaseException:
            continue
        scheme, colon, folder = str(text).rpartition("://")
        if not colon or scheme == "file":
            folders.append(Path(folder))
    return folders


def _missing(line: Line, parent: _File, file: _File, folders: Sequence[Path]) -> Problem:
    if file.name.rpartition("/")[2] == MISSING:
        return line_problem(line, parent.name, "leaves the choice open", "write a name for ???")
    where = f"under {file.where} " if file.where else ""
    what = f"{file.name}.yaml is not in {', '.join(dict.fromkeys(map(str, folders)))}"
    return Problem("defaults", what, f"put it there, or write its keys {where}in the file itself")
