"""Interpolations `${...}` in configuration values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from omegaconf import Container, DictConfig, OmegaConf

_PLAIN = re.compile(r"\$\{([^\W\d]\w*(?:\.\w+)*)\}")
"""A reference to a key by its full path, without resolver, nested or relative references."""


def interpolates(value: object) -> bool:
    """Whether a value contains `${...}`."""
    if isinstance(value, dict):
        return any(map(interpolates, value)) or any(map(interpolates, value.values()))
    return any(map(interpolates, value)) if isinstance(value, list) else isinstance(value, str) and "${" in value


def nest(flat: Mapping[str, object]) -> dict[str, Any]:
    """Turn `{"a.b": 1}` into `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        inner = tree
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[leaf] = value
    return tree


def _texts(value: object) -> Iterator[str]:
    """Yield all strings in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(inner)


class Values:
    """The value of every key. OmegaConf resolves interpolations in a tree that only has the keys to which they refer.

    Building a tree of all keys would dominate the loading time.
    """

    def __init__(self, written: Mapping[str, object]) -> None:
        self._written = dict(written)
        self._tree: DictConfig | None = None

    def __getitem__(self, path: str) -> object:
        """Return the resolved value of a key, in plain containers.

        Raises:
            OmegaConfBaseException: its `${...}` does not resolve.
        """
        if not interpolates(self._written[path]):
            return deepcopy(self._written[path])
        value = OmegaConf.select(self._tree_for(path), path)
        return OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value

    def __setitem__(self, path: str, value: object) -> None:
        self._written[path] = value
        self._tree = None

    def _tree_for(self, path: str) -> DictConfig:
        if self._tree is None and (needed := self._needed(path)) is not None:
            return OmegaConf.create(nest({name: self._written[name] for name in needed}))
        if self._tree is None:
            self._tree = OmegaConf.create(nest(self._written))
        return self._tree

    def _needed(self, path: str) -> dict[str, None] | None:
        """Return all keys to which a value refers, also indirectly; None if not all references are plain."""
        needed, pending = dict[str, None](), [path]
        while pending:
            name = pending.pop()
            if name not in self._written:
                return None
            if name in needed:
                continue
            needed[name] = None
            for text in _texts(self._written[name]):
                names = _PLAIN.findall(text)
                if text.count("${") != len(names):
                    return None
                pending.extend(names)
        return needed
