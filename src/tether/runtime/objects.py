"""Objects of this process where the configuration names files: ``object:NAME``, as `tether.train` was given them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

PREFIX = "object:"
_held: dict[str, object] = {}


def is_object(name: object) -> bool:
    """Whether a value stands for an object of this process."""
    return isinstance(name, str) and name.startswith(PREFIX)


def held(name: str) -> Any:
    """The object that a value stands for.

    Raises:
        ValueError: this process was not given it.
    """
    if name not in _held:
        argument = name.removeprefix(PREFIX)
        raise ValueError(f"{name}: an object of the process that trained. Give it again, as {argument}=...")
    return _held[name]


@contextmanager
def holding(objects: Mapping[str, object]) -> Iterator[None]:
    """While inside, ``object:NAME`` stands for these objects, by name."""
    before = dict(_held)
    _held.update({PREFIX + name: one for name, one in objects.items()})
    try:
        yield
    finally:
        _held.clear()
        _held.update(before)
