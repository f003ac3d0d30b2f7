"""A time limit on code of others that runs in this process, such as a chat template.

In the main thread a signal ends the code, which also ends a wait; in another one an exception that is raised there, at
its next line of Python.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Stop the block after `seconds`.

    Raises:
        TimeoutError: the block took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        with _in_this_thread(seconds):
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


@contextmanager
def _in_this_thread(seconds: float) -> Iterator[None]:
    def say(self: TimeoutError) -> None:
        TimeoutError.__init__(self, f"not done after {seconds:g} seconds")

    late = type("TimeoutError", (TimeoutError,), {"__init__": say})  # it is raised without arguments
    thread, lock, is_over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False
    raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def stop() -> None:
        with lock:
            if not is_over:
                raise_in_thread(thread, ctypes.py_object(late))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with suppress(late), lock:  # it may be raised here, after the block has ended
            is_over = True
            raise_in_thread(thread, None)
        timer.cancel()
