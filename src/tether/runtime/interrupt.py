"""Ctrl-C, SIGTERM and a terminal that is closed: finish the step, save, and say how to resume."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STDERR = 2
"""The file of standard error."""
PATIENCE = 10.0
"""Seconds that the step in progress waits for a process after the signal."""


class Interrupted(Exception):
    """The run was asked to stop, and the step in progress waits for a process that does not answer."""


class Interrupt:
    """Whether the run was asked to stop; call it to know."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.since = 0.0

    def __call__(self) -> bool:
        """True once a signal came."""
        return self.signal is not None

    def receive(self, number: int, _: FrameType | None) -> None:
        """Remember the first signal; the second one ends the process at once.

        A closed terminal may send SIGHUP twice, or together with another signal, so SIGHUP is never the second one.
        """
        if self.signal is not None and signal.SIGHUP in (number, self.signal):
            self.signal = signal.Signals(number) if number != signal.SIGHUP else self.signal
            return
        if self.signal is not None:
            _say(f"{signal.Signals(number).name} again: stopping now; the steps since the last checkpoint are lost.")
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal, self.since = signal.Signals(number), time.monotonic()
        _say(f"{self.signal.name}: finishing this step, then saving a checkpoint. Once more stops at once.")


def _say(text: str) -> None:
    """Write to standard error, whatever stands in its place: no error may come of it, least of all in a handler."""
    file = STDERR
    with suppress(Exception):  # scripts, notebooks and services replace it by objects without a file, or by nothing
        file = int(sys.stderr.fileno())
    with suppress(OSError):  # nobody may be reading any more
        os.write(file, f"\n{text}\n".encode())  # a handler must not use buffered streams


_current: Interrupt | None = None  # of this process: signals come to all of it


@contextmanager
def graceful_interrupt() -> Iterator[Interrupt]:
    """While inside, SIGINT, SIGTERM and SIGHUP only set a flag; `Interrupted` ends the inside, and a line says so.

    A SIGHUP that is ignored, as under nohup, stays ignored. Outside of the main thread, which alone gets signals, all
    stays as it is.
    """
    global _current
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt.receive) for number in numbers}
    outer, _current = _current, interrupt
    try:
        yield interrupt
    except Interrupted as error:
        _say(f"{error}; the run resumes from its last checkpoint")
    finally:
        _current = outer
        for number, handler in before.items():
            signal.signal(number, handler)


def give_up_if_interrupted(waiting_since: float, what: str = "a process gave no answer") -> None:
    """Call this now and then while waiting for what may never come, such as the answer of another process.

    Args:
        waiting_since: when the wait began, or when there last was a sign of life (monotonic seconds).
        what: did not happen meanwhile.

    Raises:
        Interrupted: a signal asks the run to stop, and this wait has lasted more than `PATIENCE` seconds since then.
    """
    if _current is None or _current.signal is None:
        return
    if time.monotonic() - max(waiting_since, _current.since) > PATIENCE:
        raise Interrupted(f"{_current.signal.name}: {what} for {PATIENCE:g} s, so the step in progress is dropped")
