"""`${...}` in values."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from omegaconf import Container, DictConfig, OmegaConf


def interpolates(value: object) -> bool:
    """Whether a value, or something in it, holds `${...}`."""
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


class Values:
    """The value of every key, resolved by OmegaConf where that is needed: filling its tree takes most of a load."""

    def __init__(self, written: Mapping[str, object]) -> None:
        self._written = dict(written)
        self._tree: DictConfig | None = None

    def __getitem__(self, path: str) -> object:
        """The resolved value of a key, in plain containers.

        Raises:
            OmegaConfBaseException: its `${...}` leads nowhere.
        """
        if not interpolates(self._written[path]):
            return deepcopy(self._written[path])
        if self._tree is None:
            self._tree = OmegaConf.create(nest(self._written))
        value = OmegaConf.select(self._tree, path)
        return OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value

    def __setitem__(self, path: str, value: object) -> None:
        """Write another value."""
        self._written[path] = value
        self._tree = None
