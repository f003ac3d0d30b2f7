"""The state of environments, so that a run resumes in the middle of their episodes.

An environment is a chain of layers, wrappers around the environment proper. A layer with `get_state()` and
`set_state(state)` gives its own state. Of any other layer the attributes are pickled that have changed since it was
made, and likewise the data of its class and its module: what has not changed is what configuration and code say now.
A layer is saved whole or not at all; what of it cannot be pickled is named.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import getmodule
from types import FunctionType, MethodType, ModuleType
from typing import Any

import gymnasium
import numpy as np

from tether.observations import Array

MEBIBYTE = 2**20
LIMIT = 16 * MEBIBYTE
"""Bytes for each environment; a state above it is not saved, since it would be written at every checkpoint."""
ATOMS = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, type, FunctionType, MethodType)
"""Types of values that may be the same object by chance."""
OWNERS = (bytes, bytearray, memoryview)
"""Types that own the memory of an unpickled array."""

Key = tuple[int, str | None]
"""(place, attribute), or (place, None) for a layer itself."""


@dataclass(frozen=True)
class _Place:
    """A layer, its class or its module."""

    name: str
    owner: Any

    @property
    def is_layer(self) -> bool:
        return not isinstance(self.owner, type | ModuleType)

    @property
    def gives_state(self) -> bool:
        return self.is_layer and all(callable(getattr(self.owner, name, None)) for name in ("get_state", "set_state"))

    def values(self) -> dict[str, object]:
        """Attributes that may be state."""
        if self.is_layer:
            return dict(vars(self.owner))
        return {name: value for name, value in vars(self.owner).items() if name[:2] != "__" and _is_data(value)}

    def put(self, name: str, value: object) -> None:
        """Set an attribute, past properties and ``__setattr__`` of a layer."""
        if self.is_layer:
            vars(self.owner)[name] = value
        else:
            setattr(self.owner, name, value)


class EnvKeeper:
    """Saves and restores environments of this process.

    Args:
        envs: as they were made, before their first episode.
    """

    def __init__(self, envs: Sequence[object]) -> None:
        self._count = len(envs)
        self._places = list(_places(envs))
        values, refs = self._values()
        self._made = {key: _try_fingerprint(key, value, refs) for key, value in values.items()}

    def get(self) -> tuple[bytes, tuple[str, ...]]:
        """The state of all environments, and what is not in it."""
        values, refs = self._values()
        given, left_out = dict[int, object](), dict[int, str]()
        changed, mentions = set[Key](), dict[Key, set[Key]]()
        for key, value in values.items():
            place = self._places[key[0]]
            if place.gives_state or key[0] in left_out:
                continue
            found = _try_fingerprint(key, value, refs)
            if isinstance(found, Exception):
                if place.is_layer:
                    left_out[key[0]] = f"{place.name}.{key[1]} ({found})"
                continue
            mentions[key] = found[1]
            if found != self._made.get(key):
                changed.add(key)
        changed = {key for key in _with_users(changed, mentions) if key[0] not in left_out}
        for number, place in enumerate(self._places):
            if place.gives_state:
                given[number] = place.owner.get_state()
        saved = {key: values[key] for key in changed}
        names = [place.name for place in self._places]
        # Of what was made with the environment there is one in the next process, too, to which a key can point.
        made = {i: key for i, key in refs.items() if key[1] is None or (key in self._made and key not in changed)}
        try:
            data = _pickled((names, given, saved), made)[0]
        except Exception as error:  # noqa: BLE001 (whatever the code of a user's class raises)
            return b"", (*left_out.values(), f"{', '.join(self._places[n].name for n in given)} ({error})")
        if len(data) > LIMIT * self._count:
            size = len(data) / self._count / MEBIBYTE
            return b"", (*left_out.values(), f"{names[0]} ({size:.0f} MiB for each environment)")
        return zlib.compress(data, 1), tuple(dict.fromkeys(left_out.values()))

    def set(self, data: bytes) -> None:
        """Take over what `get` gave.

        Raises:
            ValueError: it is of other environments.
        """
        if not data:
            return
        loader = _Unpickler(zlib.decompress(data), self._places)
        names, given, saved = loader.load()
        own = [place.name for place in self._places]
        if names != own:
            raise ValueError(f"saved of {', '.join(dict.fromkeys(names))}, now {', '.join(dict.fromkeys(own))}")
        for (number, name), value in saved.items():
            self._places[number].put(name, value)
        for number, state in given.items():
            self._places[number].owner.set_state(state)

    def _values(self) -> tuple[dict[Key, object], dict[int, Key]]:
        """All attributes, and the key of each object that others may share."""
        values: dict[Key, object] = {}
        refs: dict[int, Key] = {id(p.owner): (number, None) for number, p in enumerate(self._places) if p.is_layer}
        for number, place in enumerate(self._places):
            for name, value in place.values().items():
                values[number, name] = value
                if not isinstance(value, ATOMS):
                    refs.setdefault(id(value), (number, name))
        return values, refs


class _Pickler(pickle.Pickler):
    """Writes shared objects by their keys."""

    def __init__(self, file: io.BytesIO, refs: dict[int, Key], top: int | None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.mentioned: set[Key] = set()
        self._refs, self._top = refs, top
        self._memory: dict[int, int] = {}

    def persistent_id(self, obj: object) -> Key | str | None:
        """See `pickle.Pickler.persistent_id`."""
        if isinstance(obj, np.ndarray):
            self._check_memory(obj)
        key = self._refs.get(id(obj))
        if key is not None and id(obj) != self._top:
            self.mentioned.add(key)
            return key
        # A fingerprint names functions: code is not state.
        return obj.__qualname__ if self._top is not None and isinstance(obj, FunctionType) else None

    def _check_memory(self, array: Array) -> None:
        """Refuse views, which would become arrays of their own."""
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        if root.base is not None and not isinstance(root.base, OWNERS):
            raise pickle.PicklingError(f"an array is a view of {type(root.base).__name__}")
        if self._top is None and self._memory.setdefault(id(root), id(array)) != id(array):
            raise pickle.PicklingError("two arrays are views of the same memory")


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, places: Sequence[_Place]) -> None:
        super().__init__(io.BytesIO(data))
        self._places = places

    def persistent_load(self, pid: Key) -> object:
        """See `pickle.Unpickler.persistent_load`."""
        number, name = pid
        return self._places[number].owner if name is None else vars(self._places[number].owner)[name]


def _places(envs: Sequence[object]) -> Iterator[_Place]:
    """Layers of all environments, then the classes and modules that they come from, each once."""
    classes: dict[type, None] = {}
    for env in envs:
        layer = env
        while True:
            yield _Place(type(layer).__name__, layer)
            classes |= dict.fromkeys(type(layer).__mro__[:-1])
            if not isinstance(layer, gymnasium.Wrapper | gymnasium.vector.VectorWrapper):
                break
            layer = layer.env
    modules = dict.fromkeys(filter(None, map(getmodule, classes)))
    yield from (_Place(kind.__name__, kind) for kind in classes)
    yield from (_Place(module.__name__, module) for module in modules)


def _is_data(value: object) -> bool:
    return not callable(value) and not hasattr(value, "__get__") and not isinstance(value, ModuleType)


def _try_fingerprint(key: Key, value: object, refs: dict[int, Key]) -> tuple[int, set[Key]] | Exception:
    """A number for the content of a value, and the shared objects in it; or why it cannot be pickled."""
    try:
        if refs.get(id(value), key) != key:  # another name of the same object
            return 0, {refs[id(value)]}
        data, mentioned = _pickled(value, refs, id(value))
    except Exception as error:  # noqa: BLE001 (whatever the code of a user's class raises)
        return error
    return hash(data), mentioned


def _pickled(value: object, refs: dict[int, Key], top: int | None = None) -> tuple[bytes, set[Key]]:
    file = io.BytesIO()
    pickler = _Pickler(file, refs, top)
    pickler.dump(value)
    return file.getvalue(), pickler.mentioned


def _with_users(changed: set[Key], mentions: dict[Key, set[Key]]) -> set[Key]:
    """Changed objects and their holders, which have to be pickled together to stay the same objects."""
    while users := {key for key, held in mentions.items() if key not in changed and held & changed}:
        changed = changed | users
    return changed
