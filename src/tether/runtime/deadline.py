"""Limits of time and memory for foreign code in this process, such as a chat template.

In the main thread a signal interrupts code that exceeds the timeout, including blocking calls. In another thread an
exception is raised when it next executes Python code.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

_MAPPED = Path("/proc/self/statm")
"""Linux file whose first number is the count of memory pages mapped by this process."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Interrupt the block after `seconds`.

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
def memory_limit(size: int) -> Iterator[None]:
    """Limit the additional memory that the block can allocate, in bytes; only in the main thread, and on Linux.

    The limit is on address space, of which CUDA reserves far more than it uses, so nothing is limited once CUDA is
    initialised.

    Raises:
        MemoryError: the block exceeded the limit.
    """
    torch = sys.modules.get("torch")
    on_cuda = torch is not None and torch.cuda.is_initialized()
    if threading.current_thread() is not threading.main_thread() or on_cuda or not _MAPPED.exists():
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(_MAPPED.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = [limit for limit in (before, mapped + size) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


@contextmanager
def _in_this_thread(seconds: float) -> Iterator[None]:
    def say(self: TimeoutError) -> None:
        TimeoutError.__init__(self, f"not done after {seconds:g} seconds")

    late = type("TimeoutError", (TimeoutError,), {"__init__": say})  # raised without arguments
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
        with suppress(late):
            with lock:
                is_over = True
            # A pending exception is raised in this loop at the latest. It must not be withdrawn instead: Python 3.11
            # would then keep looking for an exception, and calls of functions traced by a debugger or a coverage tool
            # would never return.
            for _ in range(100):
                pass
        timer.cancel()
