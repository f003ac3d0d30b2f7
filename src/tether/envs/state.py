"""The state of environments, so that a run resumes in the middle of their episodes.

An environment is a chain of layers, wrappers around the environment proper. A layer with `get_state()` and
`set_state(state)` gives its own state. Of any other layer the attributes are pickled that have changed since it was
made, and likewise the data of its class and its module: what has not changed is what configuration and code say now.
Functions that a layer holds, or that its class or module defines, keep data too: in the variables of a closure, in
default arguments and in attributes. A layer is saved whole or not at all; what of it cannot be pickled is named.
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import getmodule
from types import BuiltinFunctionType, CellType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import gymnasium
import numpy as np

from tether.observations import Array

MEBIBYTE = 2**20
LIMIT = 16 * MEBIBYTE
"""Bytes for each environment; a state above it is not saved, since it would be written at every checkpoint."""
ATOMS = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, type, FunctionType, MethodType)
"""Types of values that may be the same object by chance."""
CODE = (type, ModuleType, FunctionType, BuiltinFunctionType)
CONSTANTS = (type(None), bool, int, float, complex, str, bytes)
"""Types of default arguments that no call can change."""
OWNERS = (bytes, bytearray, memoryview)
"""Types that own the memory of an unpickled array."""

Key = tuple[int, str | None]
"""(place, attribute), or (place, None) for a layer itself."""


@dataclass(frozen=True)
class _Place:
    """A layer, its class or its module, or a function of theirs with data of its own."""

    name: str
    owner: Any
    held: bool = False
    """Of a function: a layer holds it."""

    @property
    def is_layer(self) -> bool:
        return not isinstance(self.owner, type | ModuleType | FunctionType)

    @property
    def is_function(self) -> bool:
        return isinstance(self.owner, FunctionType)

    @property
    def gives_state(self) -> bool:
        return self.is_layer and all(callable(getattr(self.owner, name, None)) for name in ("get_state", "set_state"))

    def values(self) -> dict[str, object]:
        """Attributes that may be state."""
        if self.is_layer:
            return dict(vars(self.owner))
        if self.is_function:
            return {name: value for name, value in _variables(self.owner).items() if not isinstance(value, CODE)}
        return {name: value for name, value in vars(self.owner).items() if name[:2] != "__" and _is_data(value)}

    def put(self, name: str, value: object) -> None:
        """Set an attribute, past properties and ``__setattr__`` of a layer."""
        if self.is_layer:
            vars(self.owner)[name] = value
        elif self.is_function:
            _set_variable(self.owner, name, value)
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
        self._places += _functions(self._places)
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
                if place.is_layer or place.held or isinstance(value, GeneratorType):
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
            of = dict.fromkeys(self._places[number].name for number in (*given, *(number for number, _ in changed)))
            return b"", (*left_out.values(), f"{', '.join(of)} ({error})")
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
        objects = (each for each in enumerate(self._places) if each[1].is_layer or each[1].is_function)
        refs: dict[int, Key] = {id(place.owner): (number, None) for number, place in objects}
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
        if self._top is None or not isinstance(obj, FunctionType):
            return None
        if _keeps_more_than(self._refs, obj):
            raise pickle.PicklingError(
                f"{obj.__qualname__} was made after the environment and has variables of its own"
            )
        return f"{obj.__qualname__} {id(obj.__code__)}"  # a fingerprint names functions: code is not state

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
        return self._places[number].owner if name is None else self._places[number].values()[name]


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


def _functions(places: Sequence[_Place]) -> list[_Place]:
    """Functions with data of their own: those that layers hold, then those that their classes and modules define, each
    with the functions that they hold themselves.
    """
    found: dict[int, _Place] = {}
    finder = _Finder(place.owner for place in places if place.is_layer)
    for held in (True, False):
        for place in places:
            if place.is_layer == held and not place.gives_state:
                finder.look_through(vars(place.owner).values() if held else _defined_by(place.owner))
        while finder.functions:
            function = finder.functions.pop()
            if id(function) not in found:
                found[id(function)] = _Place(function.__qualname__, function, held)
                finder.look_through(_variables(function).values())
    return [place for place in found.values() if {*map(id, place.values().values())} - finder.layers]


class _Finder:
    """Finds the functions in values, as deep as pickle goes; layers are not looked into again."""

    def __init__(self, layers: Iterable[object]) -> None:
        self.functions: list[FunctionType] = []
        self.layers = set(map(id, layers))

    def look_through(self, values: Iterable[object]) -> None:
        """Add the functions in these values to `functions`."""
        for value in values:
            if isinstance(value, FunctionType):
                self.functions.append(value)
            elif not isinstance(value, CONSTANTS):
                with suppress(Exception):  # whatever the code of a user's class raises
                    _FindingPickler(self.functions, self.layers).dump(value)


class _FindingPickler(pickle.Pickler):
    def __init__(self, functions: list[FunctionType], layers: set[int]) -> None:
        super().__init__(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL)
        self._functions, self._layers = functions, layers

    def persistent_id(self, obj: object) -> int | None:
        """See `pickle.Pickler.persistent_id`."""
        if isinstance(obj, FunctionType):
            self._functions.append(obj)
        return id(obj) if isinstance(obj, CODE) or id(obj) in self._layers else None


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


def _defined_by(owner: type | ModuleType) -> Iterator[object]:
    """Functions of a class, also below decorators, or those that a module defines itself.

    None of Python's own modules: they keep caches there.
    """
    module = owner.__module__ if isinstance(owner, type) else owner.__name__
    if module.partition(".")[0] in sys.stdlib_module_names:
        return
    for value in vars(owner).values():
        if isinstance(value, staticmethod | classmethod):
            yield value.__func__
        elif isinstance(value, property):
            yield from (value.fget, value.fset, value.fdel)
        elif isinstance(value, FunctionType) and (isinstance(owner, type) or value.__module__ == module):
            yield value


def _variables(function: FunctionType) -> dict[str, object]:
    """Variables of the closure, default arguments that may change, and attributes; these begin with a dot."""
    found = {f".{name}": value for name, value in vars(function).items() if name != "__wrapped__"}
    found |= {name: value for name, value in _defaults(function).items() if not isinstance(value, CONSTANTS)}
    return found | {name: cell.cell_contents for name, cell in _cells(function).items() if not _is_empty(cell)}


def _cells(function: FunctionType) -> dict[str, CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is cell  # never
    except ValueError:
        return True


def _defaults(function: FunctionType) -> dict[str, object]:
    values, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})


def _set_variable(function: FunctionType, name: str, value: object) -> None:
    """Set what `_variables` gives."""
    if name.startswith("."):
        setattr(function, name[1:], value)
    elif name in (cells := _cells(function)):
        cells[name].cell_contents = value
    elif function.__kwdefaults__ and name in function.__kwdefaults__:
        function.__kwdefaults__[name] = value
    else:
        changed = _defaults(function) | {name: value}
        function.__defaults__ = tuple(changed.values())[: len(function.__defaults__ or ())]


def _keeps_more_than(refs: Mapping[int, Key], function: FunctionType, seen: frozenset[int] = frozenset()) -> bool:
    """Whether a function has data beside the layers and the functions that are known."""
    for value in _variables(function).values():
        if isinstance(value, FunctionType) and id(value) not in {*refs, *seen, id(function)}:
            if _keeps_more_than(refs, value, seen | {id(function)}):
                return True
        elif not isinstance(value, CODE) and refs.get(id(value), (0, ""))[1] is not None:
            return True
    return False


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
