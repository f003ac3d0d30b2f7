"""Objects of known classes, represented as trees that `load_state` reads without executing code.

A tree is a tensor, a number, a string, bytes or None, or a tuple of kind and content: ("list", items), ("tuple",
items), ("dict", pairs), ("array", tensor), ("tensordict", batch size, pairs) or ("object", class name, batch size,
fields).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

Classes = Mapping[str, type]
"""Dataclasses and tensor classes by name; other classes are neither saved nor created."""

_PLAIN = (bool, int, float, str, bytes)


def to_tree(value: Any, classes: Classes) -> object:
    """Return a value as a tree.

    Raises:
        TypeError: the value contains an object of an unknown class.
    """
    kind = type(value)
    if value is None or kind in _PLAIN or isinstance(value, Tensor):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return "array", torch.from_numpy(value.copy())
    if isinstance(value, list | np.ndarray):
        return "list", [to_tree(item, classes) for item in value]
    if kind is tuple:
        return "tuple", [to_tree(item, classes) for item in value]
    if isinstance(value, dict):
        return "dict", [(to_tree(key, classes), to_tree(item, classes)) for key, item in value.items()]
    if kind is TensorDict:
        return "tensordict", list(value.batch_size), [(name, to_tree(item, classes)) for name, item in value.items()]
    if classes.get(kind.__name__) is kind:
        names = [field.name for field in dataclasses.fields(value)]
        size = list(value.batch_size) if hasattr(value, "batch_size") else None
        return "object", kind.__name__, size, [(name, to_tree(getattr(value, name), classes)) for name in names]
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not stored in checkpoints: {value!r:.80}")


def from_tree(tree: Any, classes: Classes) -> Any:
    """Return the value of which `to_tree` made a tree; arrays of objects become lists.

    Raises:
        ValueError: it is not a tree made by `to_tree`.
    """
    if not isinstance(tree, tuple):
        return tree
    match tree:
        case ("array", Tensor() as tensor):
            return tensor.numpy()
        case ("list", list(items)):
            return [from_tree(item, classes) for item in items]
        case ("tuple", list(items)):
            return tuple(from_tree(item, classes) for item in items)
        case ("dict", list(pairs)):
            return {from_tree(key, classes): from_tree(item, classes) for key, item in pairs}
        case ("tensordict", list(size), list(pairs)):
            return TensorDict({name: from_tree(item, classes) for name, item in pairs}, batch_size=size)
        case ("object", str(name), size, list(pairs)) if name in classes:
            fields = {field: from_tree(item, classes) for field, item in pairs}
            return classes[name](**fields, **({} if size is None else {"batch_size": size}))
    raise ValueError(f"not a stored object: {tree!r:.80}")
