"""A timeout for foreign code in this process, such as a chat template."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Interrupt the block after `seconds`; works only in the main thread, which receives signals.

    Raises:
        TimeoutError: the block took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_: int, __: FrameType | None) -> NoReturn:
        raise TimeoutError(f"not done after {seconds:g} seconds")

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
