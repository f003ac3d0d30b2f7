"""Timeouts of calls in this process, which cannot be killed; an exception is raised in a late call instead."""

from __future__ import annotations

import math
import signal
import threading
import time
from types import FrameType
from typing import Any

from tether.runtime.interrupt import Interrupted, raise_if_interrupted

_SIGNAL = signal.SIGURG  # ignored by default, and not used for anything else
# The error for the main thread to raise, and the call to raise it in.
_late: tuple[CallWatchdog, float, Exception] | None = None
_watching: set[CallWatchdog] = set()
_before: Any = signal.SIG_DFL  # the handler to restore after the last instance is closed


class CallWatchdog:
    """Watches calls from a separate thread; the cost of `begin` and `end` is negligible.

    The exception is raised in the main thread, whether the call runs Python code or waits. Code that never releases the
    interpreter lock cannot be interrupted.

    Args:
        seconds: timeout of a call, without time in which this process is stopped.
        message: message of the error.
    """

    def __init__(self, seconds: float, message: str) -> None:
        self._max_polls = math.ceil(seconds / min(seconds, 1.0))
        self._pause, self._message = seconds / self._max_polls, message
        self._since = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="late-calls", daemon=True)
        if _is_main_thread():
            global _before
            if not _watching:
                _before = signal.signal(_SIGNAL, _raise_late)
            _watching.add(self)
            self._thread.start()

    def begin(self) -> None:
        self._since = time.monotonic()

    def end(self) -> None:
        self._since = 0.0

    def close(self) -> None:
        """Stop watching; closing the last instance restores the original handler of the signal."""
        self._closed.set()
        if self in _watching and _is_main_thread():
            self._thread.join()
            _watching.remove(self)
            if not _watching:
                signal.signal(_SIGNAL, _before)

    def _watch(self) -> None:
        global _late
        seen, polls = 0.0, 0
        while not self._closed.wait(self._pause):
            since = self._since
            polls = polls + 1 if since == seen else 0
            seen = since
            if since and (error := self._error_if_late(since, polls)):
                _late = self, since, error
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _error_if_late(self, since: float, polls: int) -> Exception | None:
        if polls >= self._max_polls:
            return RuntimeError(self._message)
        try:
            raise_if_interrupted(since)
        except Interrupted as error:
            return error
        return None

    def is_running(self, since: float) -> bool:
        """Whether the call that began at this time is still running."""
        return self._since == since


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _raise_late(_: int, __: FrameType | None) -> None:
    """Raise in the late call, unless it has ended meanwhile."""
    global _late
    late, _late = _late, None
    if late:
        calls, since, error = late
        if calls.is_running(since):
            raise error
