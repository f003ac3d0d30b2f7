"""A deadline for calls in this process, where nothing can be killed: a call that is late ends in an exception."""

from __future__ import annotations

import math
import signal
import threading
import time
from types import FrameType

from tether.runtime.interrupt import Interrupted, give_up_if_interrupted

_SIGNAL = signal.SIGURG  # ignored where nobody handles it, and used by nobody here
_late: tuple[LateCalls, float, Exception] | None = None  # what the main thread is to raise, in which call


class LateCalls:
    """Watches calls from a thread: `begin` and `end` cost nothing that could be measured.

    A call that is late raises in the main thread, whether it runs Python code there or waits for something. Code that
    keeps the interpreter lock cannot be ended by this.

    Args:
        seconds: that a call may take. Time in which this process stands still does not count.
        message: of the error.
    """

    def __init__(self, seconds: float, message: str) -> None:
        self._looks = math.ceil(seconds / min(seconds, 1.0))
        self._pause, self._message = seconds / self._looks, message
        self._since = 0.0
        self._closed = threading.Event()
        if threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, _raise_late)
            threading.Thread(target=self._watch, name="late-calls", daemon=True).start()

    def begin(self) -> None:
        """A call begins."""
        self._since = time.monotonic()

    def end(self) -> None:
        """It has ended."""
        self._since = 0.0

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()

    def _watch(self) -> None:
        global _late
        seen, looks = 0.0, 0
        while not self._closed.wait(self._pause):
            since = self._since
            looks = looks + 1 if since == seen else 0
            seen = since
            if since and (error := self._lateness(since, looks)):
                _late = self, since, error
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _lateness(self, since: float, looks: int) -> Exception | None:
        if looks >= self._looks:
            return RuntimeError(self._message)
        try:
            give_up_if_interrupted(since)
        except Interrupted as error:
            return error
        return None

    def is_in(self, since: float) -> bool:
        """Whether the call that began then has not ended."""
        return self._since == since


def _raise_late(_: int, __: FrameType | None) -> None:
    """Raise in the late call; on a busy machine it may have ended meanwhile, by an earlier signal or on its own."""
    global _late
    late, _late = _late, None
    if late:
        calls, since, error = late
        if calls.is_in(since):
            raise error
