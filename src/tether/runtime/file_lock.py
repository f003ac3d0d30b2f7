"""A file lock between processes, which prints a line for the user while another process holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from huggingface_hub.utils import WeakFileLock


@contextmanager
def locked(lock: Path, waiting: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock that only one process can have, for downloading a file or writing to a folder.

    Args:
        lock: the lock file, which is not deleted.
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
