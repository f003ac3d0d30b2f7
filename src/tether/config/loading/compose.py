"""Hydra's `defaults:` list: preset files, each mounted where its entry says, under the file's own keys.

An entry is `group/name@where` or `{group@where: name}`, relative to the group of the file that it stands in unless it
begins with a slash. Without `@where` a preset is mounted where its `# @package` line says, else at its group, and one
without a group at the top. `optional` before a group: its preset may be missing; `override` before a group: the choice
takes the place of that in another list. Presets are looked up beside the file, then in `hydra.searchpath`.
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
from tether.config.loading.defaults_list import GROUP, HERE, OWN, TOP, Line, line_problem, read_lines, read_package
from tether.config.loading.yaml_file import MISSING, read_yaml
from tether.config.problems import ConfigError, Problem

BuiltIn = Callable[[str], Mapping[object, object] | None]
Layer = dict[str, object]
"""The keys of a file, as a tree from the top."""


def compose(path: Path, tree: Mapping[object, object], built_in: BuiltIn) -> tuple[Layer, list[Problem]]:
    """Put the presets of a file under its own keys.

    Args:
        path: the file, beside which its presets are looked up.
        tree: its content, still with `defaults` and `hydra`.
        built_in: of a group and name, what a preset says that may be missing; None: it may not.

    Returns:
        The keys, `hydra` without its `searchpath` among them, and what is wrong with the lists.

    Raises:
        ConfigError: a preset is no YAML file, or has a list where another has a section.
    """
    problems: list[Problem] = []
    hydra = tree.get("hydra")
    rest = _without(hydra, "searchpath") if isinstance(hydra, dict) else hydra
    own = _without(tree, "hydra") | ({"hydra": rest} if rest else {})
    top = _File(path.stem, "", _header(path, path.stem, problems) or "")
    composition = _Composition((path.parent, *_search_path(hydra, problems)), built_in, problems)
    slots = composition.put_in(own, top, (path.stem,))
    composition.put_in_the_rest()
    return _merged(path, [layer for slot in slots for layer in slot]), problems


@dataclass(frozen=True)
class _File:
    """A file of the composition."""

    name: str
    """Group and name, as `env/libero_10`."""
    group: str
    """The group to which its own list is relative."""
    where: str
    """Dotted key under which its keys are mounted; empty: the top."""


Slot = list[Layer]
"""The layers of one line, in their place among those of others; an override may fill it later."""


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
    """Group, with its @where -> the first line that says its choice in place of that of another list."""
    chosen: dict[str, object] = field(default_factory=dict)
    """Group, with its @where -> what was chosen so far."""
    has_built_in: bool = False
    """Whether something shipped was put in, whose own list is not here to be changed."""

    def put_in(self, tree: Mapping[object, object], file: _File, stack: tuple[str, ...]) -> list[Slot]:
        """Take in the presets that a file names, and its own keys; the slots stand in the order of its lines.

        As in Hydra, the last line is followed first, so that its overrides reach the lines above it, and choices with
        `${...}` when all others of the list are known.
        """
        lines = read_lines(tree, file.name, self.problems)
        slots: list[list[Slot]] = [[[]] for _ in lines]
        for line, (slot,) in zip(lines, slots, strict=True):
            if line.is_override:
                self._override(line, file, slot)
            elif line.path == OWN:
                slot.append(_mounted(_without(tree, "defaults"), file.where))
        later: list[tuple[int, Line]] = []
        for at in reversed(range(len(lines))):
            if lines[at].path == OWN or lines[at].is_override:
                continue
            line = self._as_overridden(lines[at], file)
            if line.is_interpolated:
                later.append((at, line))
            else:
                slots[at] = self._follow(line, file, stack)
        for at, line in later:
            slots[at] = self._follow(self._filled_in(line, file), file, stack)
        return [slot for of_line in slots for slot in of_line]

    def put_in_the_rest(self) -> None:
        """Take in the choices that take the place of those of something shipped; others have none to replace."""
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

    def _as_overridden(self, line: Line, file: _File) -> Line:
        override = self.overrides.get(_key(line, file)) if line.is_group else None
        if override is None:
            return line
        override.is_used = True
        return replace(line, choice=override.line.choice)

    def _filled_in(self, line: Line, file: _File) -> Line:
        """A line with what was chosen in place of its `${...}`; with null, where that says no name."""
        try:
            name = OmegaConf.create({**self.chosen, "_": line.choice or line.path})["_"]
        except OmegaConfBaseException:
            name = None
        if isinstance(name, str):
            return replace(line, choice=name) if line.is_group else replace(line, path=name)
        fix = f"name a group that has a choice here ({', '.join(self.chosen) or 'there is none'})"
        self.problems.append(line_problem(line, file.name, "has ${...} that says no name", fix))
        return replace(line, is_group=True, choice=None)

    def _follow(self, line: Line, file: _File, stack: tuple[str, ...]) -> list[Slot]:
        """The slots of the presets that a line comes down to."""
        if line.is_group and not isinstance(line.choice, list):
            key = _key(line, file)
            if self.chosen.get(key, line.choice) != line.choice or (line.choice and key in self.chosen):
                fix = f"keep one of the two, or write override {key}: NAME at the end of the list to replace it"
                self.problems.append(line_problem(line, file.name, f"is the second line that chooses {key}", fix))
                return []
            self.chosen[key] = line.choice
        return [slot for one in line.named() for slot in self._preset(one, file, stack)]

    def _preset(self, line: Line, of: _File, stack: tuple[str, ...]) -> list[Slot]:
        written = f"{line.path}/{line.choice}" if line.is_group else line.path
        name = _from_the_top(written, of).removesuffix(".yaml")
        file = _File(name, _from_the_top(line.path, of) if line.is_group else posixpath.dirname(name), _where(line, of))
        path = next((found for folder in self.folders if (found := folder / f"{name}.yaml").is_file()), None)
        shipped = self.built_in(name) if path is None or name in stack else None
        if shipped is not None:
            self.has_built_in = True
            at_top = shipped.get(TOP)
            return [[at_top if isinstance(at_top, dict) else _mounted(shipped, file.where)]] if shipped else []
        if path is None:
            self.problems += [] if line.is_optional else [_missing(line, of, file, self.folders)]
            return []
        if name in stack:
            self.problems.append(Problem("defaults", f"{name} includes itself", "take the entry out"))
            return []
        tree = read_yaml(path)
        if line.package is None and (package := _header(path, name, self.problems)) is not None:
            file = replace(file, where=package)
        hydra = tree.get("hydra")
        if not file.where and isinstance(hydra, dict) and "searchpath" in hydra:
            fix = "write it in the run's own file"
            self.problems.append(Problem("hydra.searchpath", f"is not read from a preset ({path})", fix))
            tree["hydra"] = _without(hydra, "searchpath")
        return self.put_in(tree, file, (*stack, name))


def _from_the_top(path: str, of: _File) -> str:
    """A group or a preset as it is called from the top folder; in a list it may be relative to the file."""
    return posixpath.normpath(posixpath.join("/", of.group, path))[1:]


def _key(line: Line, of: _File) -> str:
    """The group of a line as an ``override`` line of the top folder calls it."""
    group, where = _from_the_top(line.path, of), _where(line, of)
    return group if where == group.replace("/", ".") else f"{group}@{where or TOP}"


def _where(line: Line, of: _File) -> str:
    """Where a line mounts a preset that does not say so itself."""
    group = line.path if line.is_group else posixpath.dirname(line.path)
    package = group.strip("/").replace("/", ".") if line.package is None else line.package
    return _mount_point(package, _from_the_top(group, of), of.where)


def _mount_point(package: str, group: str, where: str) -> str:
    inner = "" if package == HERE else package
    if GROUP in inner:
        inner = f"{TOP}.{inner.replace(GROUP, group.replace('/', '.'))}"
    return f"{where}.{inner}".rpartition(TOP)[2].strip(".")


def _header(path: Path, name: str, problems: list[Problem]) -> str | None:
    """Where a file says that it is mounted; None: it does not say."""
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
    """The first key that is a list in one tree and a section in the other."""
    for name in one.keys() & other.keys():
        pair = one[name], other[name]
        if isinstance(pair[0], dict) and isinstance(pair[1], dict):
            if inner := _clash(pair[0], pair[1]):
                return f"{name}.{inner}"
        elif {dict, list} == {type(value) for value in pair}:
            return str(name)
    return None


def _search_path(hydra: object, problems: list[Problem]) -> list[Path]:
    """Folders of `hydra.searchpath`; those that name an unset environment variable are left out."""
    listed = (hydra.get("searchpath") or []) if isinstance(hydra, dict) else []
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        what = f"{show(listed)} is no list of folders"
        problems.append(Problem("hydra.searchpath", what, "write it as [file://FOLDER]"))
        return []
    folders: list[Path] = []
    for item in listed:
        try:
            (text,) = OmegaConf.create([item])
        except OmegaConfBaseException:
            continue
        scheme, colon, folder = str(text).rpartition("://")
        if not colon or scheme == "file":
            folders.append(Path(folder))
    return folders


def _missing(line: Line, of: _File, file: _File, folders: Sequence[Path]) -> Problem:
    if file.name.rpartition("/")[2] == MISSING:
        return line_problem(line, of.name, "leaves the choice open", "write a name for ???")
    where = f"under {file.where} " if file.where else ""
    what = f"{file.name}.yaml is not in {', '.join(dict.fromkeys(map(str, folders)))}"
    return Problem("defaults", what, f"put it there, or write its keys {where}in the file itself")
