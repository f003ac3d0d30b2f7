"""A lock of a file between processes, with a line for the user while another process holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from huggingface_hub.utils import WeakFileLock


@contextmanager
def locked(lock: Path, waiting: str, say: Callable[[str], None]) -> Iterator[None]:
    """Lock other processes out, so that only one downloads a file or writes to a folder.

    Args:
        lock: the lock's file, which remains.
        waiting: line for `say` if another process holds the lock.
        say: prints a line for the user.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(lock, timeout=0.5))
        except TimeoutError:
            say(waiting)
            stack.enter_context(WeakFileLock(lock))
        yield
