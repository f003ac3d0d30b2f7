"""Saves and restores environments, so that a run resumes in the middle of their episodes.

An environment consists of layers: wrappers, the environment itself, and the environments in their attributes, at any
depth. Objects that pickle their constructor's arguments instead of their state (`EzPickle`) are layers, too. A layer
with ``get_state()`` and ``set_state(state)`` saves its own state. For any other layer, the attributes that have changed
since it was made are pickled, together with changed data of its class and module; unchanged data follow from
configuration and code. Functions in a layer's attributes, or defined by its class or module, can have state, too:
closure variables, default arguments and attributes. A layer is saved completely or not at all; an attribute that cannot
be pickled is reported.
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
from itertools import islice
from types import BuiltinFunctionType, CellType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import gymnasium
import numpy as np

from tether.observations import Array

MEBIBYTE = 2**20
LIMIT = 16 * MEBIBYTE
"""Maximum bytes of state per environment; larger states are not saved, because every checkpoint would contain them."""
ATOMS = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, type, FunctionType, MethodType)
"""Types whose equal values Python may represent by one object, although the program does not share them."""
CODE = (type, ModuleType, FunctionType, BuiltinFunctionType)
CONSTANTS = (type(None), bool, int, float, complex, str, bytes)
"""Types of immutable default arguments."""
MEMORY_TYPES = (bytes, bytearray, memoryview)
"""Types of the objects that own the memory of an unpickled array."""

MOVED = {
    "tether.envs.adapters.libero": "tether.integrations.robots.libero",
    "tether.envs.adapters.maniskill": "tether.integrations.robots.maniskill",
    "tether.envs.adapters.metaworld": "tether.integrations.robots.metaworld",
    "tether.envs.adapters": "tether.control.envs",
    "tether.envs.spaces": "tether.control.envs",
    "tether.envs.vectorization": "tether.control.envs",
    "tether.envs": "tether.control.envs",
}
"""Module names in checkpoints of the previous release -> their current names."""

Key = tuple[int, str | None]
"""(index of an owner, attribute), or (index, None) for the owner itself."""


@dataclass(frozen=True)
class _Owner:
    """An object with state: a layer, its class, its module, or a function with data."""

    name: str
    obj: Any
    in_layer: bool = False
    """Whether the function is an attribute of a layer, directly or nested."""

    @property
    def is_layer(self) -> bool:
        return not isinstance(self.obj, type | ModuleType | FunctionType)

    @property
    def is_function(self) -> bool:
        return isinstance(self.obj, FunctionType)

    @property
    def gives_state(self) -> bool:
        return self.is_layer and _gives_state(self.obj)

    def values(self) -> dict[str, object]:
        """Return the attributes that may be state."""
        if self.is_layer:
            return dict(vars(self.obj))
        if self.is_function:
            return {name: value for name, value in _variables(self.obj).items() if not isinstance(value, CODE)}
        return {name: value for name, value in vars(self.obj).items() if name[:2] != "__" and _is_data(value)}

    def put(self, name: str, value: object) -> None:
        """Set an attribute, bypassing properties and ``__setattr__`` of a layer."""
        if self.is_layer:
            vars(self.obj)[name] = value
        elif self.is_function:
            _set_variable(self.obj, name, value)
        else:
            setattr(self.obj, name, value)


def _gives_state(layer: object) -> bool:
    return all(callable(getattr(layer, name, None)) for name in ("get_state", "set_state"))


class EnvSnapshotter:
    """Saves and restores environments of this process.

    Args:
        envs: newly made environments, before their first episode.
    """

    def __init__(self, envs: Sequence[object]) -> None:
        self._count = len(envs)
        self._owners = _owners(envs)
        values, refs = self._values()
        self._made = {key: _try_fingerprint(key, value, refs) for key, value in values.items()}

    def get(self) -> tuple[bytes, tuple[str, ...]]:
        """Return the state of all environments, and descriptions of what could not be saved."""
        values, refs = self._values()
        own_states, left_out = dict[int, object](), dict[int, str]()
        changed, mentions = set[Key](), dict[Key, set[Key]]()
        for key, value in values.items():
            owner = self._owners[key[0]]
            if owner.gives_state or key[0] in left_out:
                continue
            fingerprint = _try_fingerprint(key, value, refs)
            if isinstance(fingerprint, Exception):
                if owner.is_layer or owner.in_layer or isinstance(value, GeneratorType):
                    left_out[key[0]] = f"{owner.name}.{key[1]} ({fingerprint})"
                continue
            mentions[key] = fingerprint[1]
            if fingerprint != self._made.get(key):
                changed.add(key)
        changed = {key for key in _with_users(changed, mentions) if key[0] not in left_out}
        for i, owner in enumerate(self._owners):
            if owner.gives_state:
                own_states[i] = owner.obj.get_state()
        saved = {key: values[key] for key in changed}
        names = [owner.name for owner in self._owners]
        # Objects that were made with the environment also exist in the resumed process, so a key can refer to them.
        made = {i: key for i, key in refs.items() if key[1] is None or (key in self._made and key not in changed)}
        try:
            data = _pickled((names, own_states, saved), made)[0]
        except Exception as error:  # noqa: BLE001 (user classes may raise anything)
            of = dict.fromkeys(self._owners[i].name for i in (*own_states, *(i for i, _ in changed)))
            return b"", (*left_out.values(), f"{', '.join(of)} ({error})")
        if len(data) > LIMIT * self._count:
            size = len(data) / self._count / MEBIBYTE
            return b"", (*left_out.values(), f"{names[0]} ({size:.0f} MiB for each environment)")
        return zlib.compress(data, 1), tuple(dict.fromkeys(left_out.values()))

    def set(self, data: bytes) -> None:
        """Restore the state that `get` returned.

        Raises:
            ValueError: the state is of different environments.
        """
        if not data:
            return
        loader = _Unpickler(zlib.decompress(data), self._owners)
        try:
            names, own_states, saved = loader.load()
        except Exception as error:  # user classes may raise anything
            raise ValueError(f"their state cannot be read: {type(error).__name__}: {error}") from error
        names, expected = list(map(_current_name, names)), [owner.name for owner in self._owners]
        if names != expected:
            raise ValueError(f"saved of {', '.join(dict.fromkeys(names))}, now {', '.join(dict.fromkeys(expected))}")
        for (i, name), value in saved.items():
            self._owners[i].put(name, value)
        for i, state in own_states.items():
            self._owners[i].obj.set_state(state)

    def _values(self) -> tuple[dict[Key, object], dict[int, Key]]:
        """Return all attributes, and the key of each object that may be shared."""
        values: dict[Key, object] = {}
        objects = (each for each in enumerate(self._owners) if each[1].is_layer or each[1].is_function)
        refs: dict[int, Key] = {id(owner.obj): (i, None) for i, owner in objects}
        for i, owner in enumerate(self._owners):
            for name, value in owner.values().items():
                values[i, name] = value
                if not isinstance(value, ATOMS):
                    refs.setdefault(id(value), (i, name))
        return values, refs


class _Pickler(pickle.Pickler):
    """Pickles shared objects as references by their keys."""

    def __init__(self, file: io.BytesIO, refs: dict[int, Key], top: int | None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.mentioned: set[Key] = set()
        self._refs, self._top = refs, top
        self._memory: dict[int, int] = {}

    def persistent_id(self, obj: object) -> Key | str | None:
        if isinstance(obj, np.ndarray):
            self._check_memory(obj)
        key = self._refs.get(id(obj))
        if key is not None and id(obj) != self._top:
            self.mentioned.add(key)
            return key
        if _is_ez_pickle(obj):
            raise pickle.PicklingError(
                f"{type(obj).__name__} was made after the environment and pickles its constructor's arguments, not its "
                "state"
            )
        if self._top is None or not isinstance(obj, FunctionType):
            return None
        if _has_other_state(self._refs, obj):
            raise pickle.PicklingError(
                f"{obj.__qualname__} was made after the environment and has variables of its own"
            )
        return f"{obj.__qualname__} {id(obj.__code__)}"  # fingerprints have names of functions: code is not state

    def _check_memory(self, array: Array) -> None:
        """Refuse views, which unpickling would turn into separate arrays."""
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        if root.base is not None and not isinstance(root.base, MEMORY_TYPES):
            raise pickle.PicklingError(f"an array is a view of {type(root.base).__name__}")
        if self._top is None and self._memory.setdefault(id(root), id(array)) != id(array):
            raise pickle.PicklingError("two arrays are views of the same memory")


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, owners: Sequence[_Owner]) -> None:
        super().__init__(io.BytesIO(data))
        self._owners = owners

    def persistent_load(self, pid: Key) -> object:
        i, name = pid
        return self._owners[i].obj if name is None else self._owners[i].values()[name]

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(_current_name(module), name)


def _current_name(name: str) -> str:
    """Return the current name of a module, which may have its older name in a checkpoint."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def _owners(envs: Sequence[object]) -> list[_Owner]:
    """Return the layers of all environments, their classes and modules, and the functions with data, in this order.

    Functions are in the order of `_functions`.
    """
    finder, shared = _Finder(), dict[type | ModuleType, None]()
    for env in envs:
        begin = len(finder.layers)
        finder.add_layers([env])
        for layer in islice(finder.layers, begin, None):  # the list grows meanwhile
            finder.search_layer(layer)
            kinds = type(layer).__mro__[:-1]
            owners: list[type | ModuleType] = [*kinds, *filter(None, map(getmodule, kinds))]
            for each in owners:
                if each not in shared:
                    shared[each] = None
                    finder.add_layers(_Owner(each.__name__, each).values().values())
    layers = [_Owner(type(layer).__name__, layer) for layer in finder.layers]
    classes_first = sorted(shared, key=lambda each: isinstance(each, ModuleType))
    others = [_Owner(each.__name__, each) for each in classes_first]
    known = {id(layer) for layer in finder.layers}
    functions = _functions([*layers, *others], finder)
    return [*layers, *others, *(each for each in functions if {*map(id, each.values().values())} - known)]


def _functions(owners: Sequence[_Owner], finder: _Finder) -> list[_Owner]:
    """Return the functions in layers, then those of classes and modules; each is followed by the functions in its data.

    Checkpoints refer to an owner by its index, so the order must not change.
    """
    functions, stack = dict[int, _Owner](), list[FunctionType]()
    for in_layer in (True, False):
        for owner in owners:
            if owner.is_layer == in_layer and not owner.gives_state:
                stack += finder.functions_in(vars(owner.obj).values() if in_layer else _defined_by(owner.obj))
        while stack:
            function = stack.pop()
            if id(function) not in functions:
                functions[id(function)] = _Owner(function.__qualname__, function, in_layer)
                stack += finder.functions_in(_variables(function).values())
    return list(functions.values())


def _is_ez_pickle(obj: object) -> bool:
    """Whether an object is pickled as the arguments of its constructor (Gymnasium's `EzPickle`)."""
    return not isinstance(obj, type) and any(base.__name__ == "EzPickle" for base in type(obj).__mro__)


def _is_layer(obj: object) -> bool:
    """Whether an object is saved by its attributes: an environment, or an object whose state pickle would not save."""
    return isinstance(obj, gymnasium.Env | gymnasium.vector.VectorEnv) or _is_ez_pickle(obj)


class _Finder:
    """Finds layers and functions in values, at any depth that pickle reaches, and layers in variables of functions."""

    def __init__(self) -> None:
        self.layers: list[object] = []
        self._known = set[int]()
        self._known_functions = set[int]()
        self._contents: dict[int, tuple[object, list[object]]] = {}

    def add_layers(self, values: Iterable[object]) -> None:
        """Add those values that are layers."""
        for value in values:
            if _is_layer(value) and id(value) not in self._known:
                self._known.add(id(value))
                self.layers.append(value)

    def search_layer(self, layer: Any) -> None:
        """Search a layer's attributes. If it saves its own state, add only the layer that it wraps."""
        if not _gives_state(layer):
            self._search_values(vars(layer).values())
        elif isinstance(layer, gymnasium.Wrapper | gymnasium.vector.VectorWrapper):
            self.add_layers([layer.env])

    def _search_values(self, values: Iterable[object]) -> None:
        for value in values:
            if isinstance(value, FunctionType):
                if id(value) not in self._known_functions:
                    self._known_functions.add(id(value))
                    self._search_values(_variables(value).values())
            elif not isinstance(value, CONSTANTS):
                contents = self._layers_and_functions(value)
                self.add_layers(contents)
                self._search_values(each for each in contents if isinstance(each, FunctionType))

    def functions_in(self, values: Iterable[object]) -> Iterator[FunctionType]:
        """Yield the functions in values, but not those in the functions' variables."""
        for value in values:
            if isinstance(value, FunctionType):
                yield value
            elif not isinstance(value, CONSTANTS):
                yield from (each for each in self._layers_and_functions(value) if isinstance(each, FunctionType))

    def _layers_and_functions(self, value: object) -> list[object]:
        """Return the layers and functions in a value, but not the contents of these."""
        if id(value) not in self._contents:  # cached: both passes search layers, and pickling is slow
            contents = list[object]()
            with suppress(Exception):  # user classes may raise anything
                _FindingPickler(contents).dump(value)
            self._contents[id(value)] = value, contents  # stored with the value, whose id would otherwise be reused
        return self._contents[id(value)][1]


class _FindingPickler(pickle.Pickler):
    def __init__(self, found: list[object]) -> None:
        super().__init__(_NullFile(), protocol=pickle.HIGHEST_PROTOCOL)
        self._found = found

    def persistent_id(self, obj: object) -> int | None:
        is_found = isinstance(obj, FunctionType) or _is_layer(obj)
        if is_found:
            self._found.append(obj)
        return id(obj) if is_found or isinstance(obj, CODE) else None


class _NullFile(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


def _defined_by(owner: type | ModuleType) -> Iterator[object]:
    """Yield the functions of a class, including decorated ones, or those that a module itself defines.

    The standard library is excluded, because its functions have caches.
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
    """Return a function's closure variables, mutable default arguments and attributes; names of attributes start with a
    dot.
    """
    variables = {f".{name}": value for name, value in vars(function).items() if name != "__wrapped__"}
    variables |= {name: value for name, value in _defaults(function).items() if not isinstance(value, CONSTANTS)}
    return variables | {name: cell.cell_contents for name, cell in _cells(function).items() if not _is_empty(cell)}


def _cells(function: FunctionType) -> dict[str, CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is cell  # never true; raises if the cell is empty
    except ValueError:
        return True


def _defaults(function: FunctionType) -> dict[str, object]:
    values, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})


def _set_variable(function: FunctionType, name: str, value: object) -> None:
    """Set one of the variables that `_variables` returns."""
    if name.startswith("."):
        setattr(function, name[1:], value)
    elif name in (cells := _cells(function)):
        cells[name].cell_contents = value
    elif function.__kwdefaults__ and name in function.__kwdefaults__:
        function.__kwdefaults__[name] = value
    else:
        changed = _defaults(function) | {name: value}
        function.__defaults__ = tuple(changed.values())[: len(function.__defaults__ or ())]


def _has_other_state(refs: Mapping[int, Key], function: FunctionType, seen: frozenset[int] = frozenset()) -> bool:
    """Whether a function has data other than layers and functions with a key."""
    for value in _variables(function).values():
        if isinstance(value, FunctionType) and id(value) not in {*refs, *seen, id(function)}:
            if _has_other_state(refs, value, seen | {id(function)}):
                return True
        elif not isinstance(value, CODE) and refs.get(id(value), (0, ""))[1] is not None:
            return True
    return False


def _is_data(value: object) -> bool:
    return not callable(value) and not hasattr(value, "__get__") and not isinstance(value, ModuleType)


def _try_fingerprint(key: Key, value: object, refs: dict[int, Key]) -> tuple[int, set[Key]] | Exception:
    """Return a hash of a value and the shared objects in it, or the error if it cannot be pickled."""
    try:
        if refs.get(id(value), key) != key:  # a second name of the same object
            return 0, {refs[id(value)]}
        data, mentioned = _pickled(value, refs, id(value))
    except Exception as error:  # noqa: BLE001 (user classes may raise anything)
        return error
    return hash(data), mentioned


def _pickled(value: object, refs: dict[int, Key], top: int | None = None) -> tuple[bytes, set[Key]]:
    file = io.BytesIO()
    pickler = _Pickler(file, refs, top)
    pickler.dump(value)
    return file.getvalue(), pickler.mentioned


def _with_users(changed: set[Key], mentions: dict[Key, set[Key]]) -> set[Key]:
    """Return the changed objects and those that refer to them, which are pickled together so that references stay
    shared."""
    while users := {key for key, referred in mentions.items() if key not in changed and referred & changed}:
        changed = changed | users
    return changed
