"""Hydra's `defaults:` list: preset files, each mounted where its entry says, under the file's own keys.

An entry is `group/name@where` or `{group@where: name}`, relative to the group of the file that it stands in unless it
begins with a slash. Without `@where` a preset is mounted where its `# @package` line says, else at its group, and one
without a group at the top. `optional` before an entry: it may be missing; `override` before a group: its choice takes
the place of that in a preset's list. Presets are looked up beside the file, then in `hydra.searchpath`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tether.config.loading.yaml_file import read_yaml
from tether.config.problems import ConfigError, Problem

OWN = "_self_"
HERE, TOP = "_here_", "_global_"
_OPTIONAL, _OVERRIDE = "optional ", "override "
_PACKAGE = re.compile(r"(?:\s*(?:#[^\n]*)?\n)*?\s*#\s*@package\s+(\S+)")
_CHOSEN = re.compile(r"\$\{([\w/]+)\}")
"""In a choice: the choice of another group, which stands above it."""


@dataclass(frozen=True)
class Entry:
    """One line of a defaults list."""

    name: str
    """Group and name, as `env/libero_10`; or `_self_`."""
    where: str
    """Dotted key under which its keys are mounted; empty: the top."""
    parent: str | None = None
    """Where the naming file is mounted, to which its own `# @package` line is relative; None: that does not count."""
    is_optional: bool = False


def compose(
    path: Path, tree: Mapping[object, object], built_in: Callable[[str], Mapping[object, object] | None]
) -> tuple[dict[str, object], list[Problem]]:
    """Put the presets of a file under its own keys.

    Args:
        path: the file, beside which its presets are looked up.
        tree: its content, still with `defaults` and `hydra`.
        built_in: of a group and name, what a preset says that may be missing; None: it may not.

    Raises:
        ConfigError: a preset is no YAML file, or has a list where another has a section.
    """
    problems: list[Problem] = []
    folders = (path.parent, *_search_path(tree, problems))
    lookup = _Lookup(folders, built_in, problems, _overrides(tree.get("defaults")))
    layers = list(_layers(tree, Entry(path.stem, ""), lookup, (path.stem,)))
    try:
        merged = OmegaConf.to_container(OmegaConf.merge({}, *layers), resolve=False)
    except OmegaConfBaseException as error:
        clashes = (_clash(one, other) for one, other in combinations(layers, 2))
        key = next(filter(None, clashes), "a key")
        what = f"{key} is a list in one of the file and its presets, and a section of keys in another"
        raise ConfigError([Problem(str(path), what, "write the same in both")]) from error
    assert isinstance(merged, dict)
    return {str(name): value for name, value in merged.items()}, problems


@dataclass
class _Lookup:
    folders: Sequence[Path]
    built_in: Callable[[str], Mapping[object, object] | None]
    problems: list[Problem]
    overrides: Mapping[str, object]
    """Of the file's own list: group, with its @where -> the choice in place of that of a preset's list."""
    chosen: dict[str, object] = field(default_factory=dict)
    """Group, with its @where -> what was chosen so far."""
    has_built_in: bool = False
    """Whether something shipped was put in, whose own list is not here to be changed."""


def _overrides(defaults: object) -> dict[str, object]:
    """The choices of ``override GROUP: NAME`` lines, but for Hydra's own groups, such as its logging."""
    items = [item for item in defaults if isinstance(item, dict)] if isinstance(defaults, list) else []
    lines = [(str(left), name) for item in items for left, name in item.items()]
    groups = {left.removeprefix(_OVERRIDE).lstrip("/"): name for left, name in lines if left.startswith(_OVERRIDE)}
    return {group: name for group, name in groups.items() if not group.startswith("hydra/")}


def _layers(
    tree: Mapping[object, object], of: Entry, lookup: _Lookup, stack: tuple[str, ...]
) -> Iterator[dict[str, object]]:
    """The keys of every preset, then or in between those of the tree itself, each as a tree from the top."""
    own = {name: value for name, value in tree.items() if name not in ("defaults", "hydra")}
    has_own = False
    for entry in _entries(tree.get("defaults") or [], of, lookup):
        if entry.name == OWN:
            has_own = True
            yield _mounted(own, of.where)
            continue
        file = next((found for folder in lookup.folders if (found := folder / f"{entry.name}.yaml").is_file()), None)
        if file is not None and entry.name not in stack:
            preset = read_yaml(file)
            if entry.parent is not None and (package := _PACKAGE.match(file.read_text(encoding="utf-8"))):
                entry = replace(entry, where=_mount_point(entry.name, package[1], entry.parent))
            yield from _layers(preset, entry, lookup, (*stack, entry.name))
        elif file is not None:
            lookup.problems.append(Problem("defaults", f"{entry.name} includes itself", "take the entry out"))
        elif (shipped := lookup.built_in(entry.name)) is not None:
            lookup.has_built_in = True
            at_top = shipped.get(TOP)
            if isinstance(at_top, dict):
                yield at_top
            elif shipped:
                yield from _layers(shipped, entry, lookup, stack)
        elif not entry.is_optional:
            lookup.problems.append(_missing(entry, lookup.folders))
    if not has_own:
        yield _mounted(own, of.where)


def _clash(one: Mapping[str, object], other: Mapping[str, object]) -> str | None:
    """The first key that is a list in one tree and a section in the other."""
    for name in one.keys() & other.keys():
        pair = one[name], other[name]
        if isinstance(pair[0], dict) and isinstance(pair[1], dict):
            if inner := _clash(pair[0], pair[1]):
                return f"{name}.{inner}"
        elif {dict, list} == {type(value) for value in pair}:
            return str(name)
    return None


def _entries(defaults: object, of: Entry, lookup: _Lookup) -> Iterator[Entry]:
    """The lines of the defaults list of a file, each read when what stands above it was put in."""
    for item in defaults if isinstance(defaults, list) else [defaults]:
        for left, choice in item.items() if isinstance(item, dict) else [(item, None)]:
            written = str(left).removeprefix(_OPTIONAL)
            group, _, package = written.removeprefix(_OVERRIDE).partition("@")
            if isinstance(item, dict) or written.startswith(_OVERRIDE):
                choice = _choice(written, _key(group, package, of), choice, lookup)
                if choice is None:
                    continue
            for name in choice if isinstance(choice, list) else [choice]:
                full = group if name is None else f"{group}/{name}"
                if full == OWN:
                    yield Entry(OWN, of.where)
                else:
                    where = _mount_point(full.removeprefix("/"), package, of.where)
                    parent = None if package else of.where
                    yield Entry(_from_the_top(full, of), where, parent, str(left).startswith(_OPTIONAL))


def _choice(written: str, key: str, choice: object, lookup: _Lookup) -> object:
    """The preset that a line puts in for a group; None: it puts in nothing."""
    if written.startswith(_OVERRIDE):
        is_own = key in lookup.overrides
        if key.startswith("hydra/") or (is_own and key in lookup.chosen):
            return None
        if not is_own or not lookup.has_built_in:
            why = f"nothing above chooses {key}" if is_own else "is not in the run's own file"
            lookup.problems.append(Problem("defaults", f"{written}: {why}", f"write {key}: {choice} there"))
            return None
    else:
        choice = lookup.overrides.get(key, choice)
    if isinstance(choice, str):
        choice = _CHOSEN.sub(lambda name: str(lookup.chosen.get(name[1], name[0])), choice)
    lookup.chosen[key] = choice
    return choice


def _from_the_top(group: str, of: Entry) -> str:
    """A group or a preset as it is called from the top folder; in a list it may be relative to the file."""
    return posixpath.normpath(posixpath.join("/", posixpath.dirname(of.name), group))[1:]


def _key(group: str, package: str, of: Entry) -> str:
    """A group as an ``override`` line of the file calls it."""
    where = _mount_point(f"{group}/", package, of.where) if package else ""
    return _from_the_top(group, of) + (f"@{where or TOP}" if package else "")


def _mount_point(name: str, package: str, where: str) -> str:
    if package == TOP:
        return ""
    inner = "" if package == HERE else package or name.rpartition("/")[0].replace("/", ".")
    return ".".join(part for part in (where, inner) if part)


def _mounted(tree: Mapping[object, object], where: str) -> dict[str, object]:
    mounted = {str(name): value for name, value in tree.items()}
    for name in reversed(where.split(".") if where else []):
        mounted = {name: mounted}
    return mounted


def _search_path(tree: Mapping[object, object], problems: list[Problem]) -> list[Path]:
    """Folders of `hydra.searchpath`; those that name an unset environment variable are left out."""
    hydra = tree.get("hydra")
    listed = (hydra.get("searchpath") or []) if isinstance(hydra, dict) else []
    folders: list[Path] = []
    if not isinstance(listed, list):
        problems.append(Problem("hydra.searchpath", f"{listed!r} is no list", "write it as [file://FOLDER]"))
        return folders
    for item in listed:
        try:
            (text,) = OmegaConf.create([item])
        except OmegaConfBaseException:
            continue
        if str(text).startswith("file://"):
            folders.append(Path(str(text).removeprefix("file://")))
    return folders


def _missing(entry: Entry, folders: Sequence[Path]) -> Problem:
    where = f"under {entry.where} " if entry.where else ""
    what = f"{entry.name}.yaml is not in {', '.join(dict.fromkeys(map(str, folders)))}"
    return Problem("defaults", what, f"put it there, or write its keys {where}in the file itself")
