"""Objects of this process where the configuration names files: ``object:NAME``, as `tether.train` was given them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

PREFIX = "object:"
WAIT_SECONDS = 5.0
"""For another thread that makes something of objects: an environment, say, but not a run."""
_held: dict[str, object] = {}
_one_thread = threading.RLock()


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
    """While inside, ``object:NAME`` stands for these objects, by name, in all threads; one thread at a time is inside.

    Raises:
        ValueError: another thread stays inside, as one that trains does.
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
