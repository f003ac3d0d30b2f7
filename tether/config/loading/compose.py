"""Hydra's `defaults:` list: preset files, each mounted where its entry says, under the file's own keys.

An entry is `group/name@where` or `{group@where: name}`, relative to the group of the file that it stands in unless it
begins with a slash. Without `@where` a preset is mounted at its group, and one without a group at the top. Presets are
looked up beside the file, then in `hydra.searchpath`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tether.config.loading.yaml_file import read_yaml
from tether.config.problems import Problem

OWN = "_self_"
HERE, TOP = "_here_", "_global_"


@dataclass(frozen=True)
class Entry:
    """One line of a defaults list."""

    name: str
    """Group and name, as `env/libero_10`; or `_self_`."""
    where: str
    """Dotted key under which its keys are mounted; empty: the top."""


def compose(
    path: Path, tree: Mapping[object, object], built_in: Callable[[str], Mapping[object, object] | None]
) -> tuple[dict[str, object], list[Problem]]:
    """Put the presets of a file under its own keys.

    Args:
        path: the file, beside which its presets are looked up.
        tree: its content, still with `defaults` and `hydra`.
        built_in: of a group and name, what a preset says that may be missing; None: it may not.

    Raises:
        ConfigError: a preset is no YAML file.
    """
    problems: list[Problem] = []
    folders = (path.parent, *_search_path(tree))
    lookup = _Lookup(folders, built_in, problems)
    layers = list(_layers(tree, Entry(path.stem, ""), lookup, (path.stem,)))
    merged = OmegaConf.to_container(OmegaConf.merge({}, *layers), resolve=False)
    assert isinstance(merged, dict)
    return {str(name): value for name, value in merged.items()}, problems


@dataclass(frozen=True)
class _Lookup:
    folders: Sequence[Path]
    built_in: Callable[[str], Mapping[object, object] | None]
    problems: list[Problem]


def _layers(
    tree: Mapping[object, object], of: Entry, lookup: _Lookup, stack: tuple[str, ...]
) -> Iterator[dict[str, object]]:
    """The keys of every preset, then or in between those of the tree itself, each as a tree from the top."""
    own = {name: value for name, value in tree.items() if name not in ("defaults", "hydra")}
    entries = list(_entries(tree.get("defaults") or [], of))
    if all(entry.name != OWN for entry in entries):
        entries.append(Entry(OWN, of.where))
    for entry in entries:
        if entry.name == OWN:
            yield _mounted(own, of.where)
            continue
        file = next((found for folder in lookup.folders if (found := folder / f"{entry.name}.yaml").is_file()), None)
        if file is not None and entry.name not in stack:
            yield from _layers(read_yaml(file), entry, lookup, (*stack, entry.name))
        elif file is not None:
            lookup.problems.append(Problem("defaults", f"{entry.name} includes itself", "take the entry out"))
        elif (shipped := lookup.built_in(entry.name)) is not None:
            yield from _layers(shipped, entry, lookup, stack) if shipped else ()
        else:
            lookup.problems.append(_missing(entry, lookup.folders))


def _entries(defaults: object, of: Entry) -> Iterator[Entry]:
    """The lines of the defaults list of a file."""
    for item in defaults if isinstance(defaults, list) else [defaults]:
        pairs = item.items() if isinstance(item, dict) else [(item, None)]
        for left, chosen in pairs:
            group, _, package = str(left).removeprefix("optional ").partition("@")
            if isinstance(item, dict) and (chosen is None or group.startswith("override ")):
                continue  # nothing chosen, or a choice of Hydra's own, such as its logging
            for name in chosen if isinstance(chosen, list) else [chosen]:
                full = group if name is None else f"{group}/{name}"
                if full == OWN:
                    yield Entry(OWN, of.where)
                else:
                    absolute = posixpath.normpath(posixpath.join("/", posixpath.dirname(of.name), full))[1:]
                    yield Entry(absolute, _mount_point(full.removeprefix("/"), package, of.where))


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


def _search_path(tree: Mapping[object, object]) -> list[Path]:
    """Folders of `hydra.searchpath`; those that name an unset environment variable are left out."""
    hydra = tree.get("hydra")
    listed = (hydra.get("searchpath") or []) if isinstance(hydra, dict) else []
    folders: list[Path] = []
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
