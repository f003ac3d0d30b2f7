"""Ctrl-C, SIGTERM and a closed terminal: finish the step, save, and print how to resume."""

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
"""File descriptor of standard error."""
GRACE_SECONDS = 10.0
"""Seconds that the current step continues to wait for a process after the signal."""


class Interrupted(Exception):
    """The run was asked to stop while the current step waits for a process that does not answer."""


class Interrupt:
    """Records whether the run was asked to stop; calling it returns the answer."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.since = 0.0

    def __call__(self) -> bool:
        """Return whether a signal was received."""
        return self.signal is not None

    def receive(self, number: int, _: FrameType | None) -> None:
        """Record the first signal; the second one ends the process immediately.

        A closed terminal can send SIGHUP twice or with another signal, so SIGHUP does not count as the second one.
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
    """Write to standard error without ever raising, as required in a signal handler."""
    file = STDERR
    # Scripts, notebooks and services replace it by objects without a file descriptor, or by None.
    with suppress(Exception):
        file = int(sys.stderr.fileno())
    with suppress(OSError):  # standard error may be closed
        os.write(file, f"\n{text}\n".encode())  # a handler must not use buffered streams


_current: Interrupt | None = None  # one per process, like signals


@contextmanager
def graceful_interrupt() -> Iterator[Interrupt]:
    """Inside the block, make SIGINT, SIGTERM and SIGHUP only set a flag; report an `Interrupted` that ends the block.

    An ignored SIGHUP, as under nohup, stays ignored. Outside of the main thread, which is the only one to receive
    signals, nothing changes.
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


def raise_if_interrupted(waiting_since: float, what: str = "a process gave no answer") -> None:
    """Raise `Interrupted` if a wait lasts too long after a signal; call it regularly during the wait.

    Args:
        waiting_since: monotonic time of the start of the wait, or of the last heartbeat.
        what: what is being waited for, as a clause for the message.

    Raises:
        Interrupted: a signal was received, and the wait has lasted more than `GRACE_SECONDS` seconds since then.
    """
    if _current is None or _current.signal is None:
        return
    if time.monotonic() - max(waiting_since, _current.since) > GRACE_SECONDS:
        raise Interrupted(f"{_current.signal.name}: {what} for {GRACE_SECONDS:g} s, so the step in progress is dropped")
