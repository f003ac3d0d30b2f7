"""Objects in place of files in the configuration; ``object:NAME`` refers to an object passed to `tether.train`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

PREFIX = "object:"
WAIT_SECONDS = 5.0
"""Timeout for another thread that uses objects: long enough while it makes an environment, not while it trains."""
_held: dict[str, object] = {}
_one_thread = threading.RLock()


def is_object(name: object) -> bool:
    """Whether a value refers to an object of this process."""
    return isinstance(name, str) and name.startswith(PREFIX)


def registered_object(name: str) -> Any:
    """Return the object to which a value refers.

    Raises:
        ValueError: this process has no such object.
    """
    if name not in _held:
        argument = name.removeprefix(PREFIX)
        raise ValueError(f"{name}: an object of the process that trained. Give it again, as {argument}=...")
    return _held[name]


@contextmanager
def register_objects(objects: Mapping[str, object]) -> Iterator[None]:
    """Let ``object:NAME`` refer to these objects inside the block, in all threads; one thread at a time can enter.

    Raises:
        ValueError: another thread does not leave its block, for example because it trains.
    """
    if not objects:
        yield
        return
    if not _one_thread.acquire(timeout=WAIT_SECONDS):
        names = ", ".join(f"{name}=" for name in objects)
        raise ValueError(
            f"{names} another thread of this process trains with objects of its own, which go by the same names. Call "
            "this once it is done, or in a process of its own."
        )
    before = dict(_held)
    _held.update({PREFIX + name: one for name, one in objects.items()})
    try:
        yield
    finally:
        _held.clear()
        _held.update(before)
        _one_thread.release()
