"""Hydra's `defaults:` list: preset files of RLinf, each mounted where its entry says, under the file's own keys.

An entry is `group/name@where` or `{group@where: name}`. Without `@where` a preset is mounted at its group, and one
without a group at the top. Presets are looked up beside the file, then in `hydra.searchpath`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tether.config.problems import Problem
from tether.config.yaml_file import read_yaml

OWN = "_self_"
HERE, TOP = "_here_", "_global_"
HARMLESS = ("hybrid_engines", "training_backend", "weight_syncer")
"""Groups whose presets set up sharding and weight transfer, which one process does without: they may be missing."""


@dataclass(frozen=True)
class Entry:
    """One line of a defaults list."""

    name: str
    """Group and name, as `env/libero_10`; or `_self_`."""
    where: str
    """Dotted key under which its keys are mounted; empty: the top."""


def compose(path: Path, tree: Mapping[Any, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Put the presets of a file under its own keys.

    Args:
        path: the file, beside which its presets are looked up.
        tree: its content, still with `defaults` and `hydra`.

    Raises:
        ConfigError: a preset is no YAML file.
    """
    problems: list[Problem] = []
    folders = (path.parent, *_search_path(tree))
    layers = list(_layers(tree, "", folders, problems, (path.stem,)))
    merged = OmegaConf.to_container(OmegaConf.merge({}, *layers), resolve=False)
    assert isinstance(merged, dict)
    return {str(name): value for name, value in merged.items()}, problems


def _layers(
    tree: Mapping[Any, Any], where: str, folders: Sequence[Path], problems: list[Problem], stack: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """The keys of every preset, then or in between those of the tree itself, each as a tree from the top."""
    own = {name: value for name, value in tree.items() if name not in ("defaults", "hydra")}
    entries = list(_entries(tree.get("defaults") or [], where))
    if all(entry.name != OWN for entry in entries):
        entries.append(Entry(OWN, where))
    for entry in entries:
        if entry.name == OWN:
            yield _mounted(own, where)
            continue
        file = next((found for folder in folders if (found := folder / f"{entry.name}.yaml").is_file()), None)
        if file is not None and entry.name not in stack:
            yield from _layers(read_yaml(file), entry.where, folders, problems, (*stack, entry.name))
        elif file is not None:
            problems.append(Problem("defaults", f"{entry.name} includes itself", "take the entry out"))
        elif entry.name.split("/")[0] not in HARMLESS:
            problems.append(_missing(entry, folders))


def _entries(defaults: Any, where: str) -> Iterator[Entry]:
    for item in defaults if isinstance(defaults, list) else [defaults]:
        pairs = item.items() if isinstance(item, dict) else [(item, None)]
        for left, name in pairs:
            group, _, package = str(left).removeprefix("optional ").removeprefix("/").partition("@")
            if isinstance(item, dict) and (name is None or group.startswith("override ")):
                continue  # nothing chosen, or a choice of Hydra's own, such as its logging
            full = group if name is None else f"{group}/{name}"
            yield Entry(full, where if full == OWN else _mount_point(full, package, where))


def _mount_point(name: str, package: str, where: str) -> str:
    if package == TOP:
        return ""
    inner = "" if package == HERE else package or name.rpartition("/")[0].replace("/", ".")
    return ".".join(part for part in (where, inner) if part)


def _mounted(tree: Mapping[Any, Any], where: str) -> dict[str, Any]:
    mounted = {str(name): value for name, value in tree.items()}
    for name in reversed(where.split(".") if where else []):
        mounted = {name: mounted}
    return mounted


def _search_path(tree: Mapping[Any, Any]) -> list[Path]:
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
    what = f"{entry.name}.yaml is not in {', '.join(map(str, folders))}"
    return Problem("defaults", what, f"put RLinf's presets there, or write its keys {where}in the file itself")
