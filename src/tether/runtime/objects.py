"""Objects in place of files in the configuration: ``object:NAME`` is an object passed to `tether.train`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

PREFIX = "object:"
_held: dict[str, object] = {}


def is_object(name: object) -> bool:
    """Whether a value names an object of this process."""
    return isinstance(name, str) and name.startswith(PREFIX)


def held(name: str) -> Any:
    """Return the object that a value names.

    Raises:
        ValueError: this process has no such object.
    """
    if name not in _held:
        argument = name.removeprefix(PREFIX)
        raise ValueError(f"{name}: an object of the process that trained. Give it again, as {argument}=...")
    return _held[name]


@contextmanager
def holding(objects: Mapping[str, object]) -> Iterator[None]:
    """Let ``object:NAME`` name these objects inside the block."""
    before = dict(_held)
    _held.update({PREFIX + name: one for name, one in objects.items()})
    try:
        yield
    finally:
        _held.clear()
        _held.update(before)
