"""Ctrl-C and SIGTERM: finish the step, save, and say how to go on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether the run was asked to stop; call it to know."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        """True once a signal came."""
        return self.signal is not None

    def receive(self, number: int, _: FrameType | None) -> None:
        """Remember the first signal; the second one ends the process at once."""
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = signal.Signals(number)
        print(
            f"\n{self.signal.name}: finishing this step, then saving a checkpoint. Once more stops at once.",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def graceful_interrupt() -> Iterator[Interrupt]:
    """While inside, SIGINT and SIGTERM only set a flag."""
    interrupt = Interrupt()
    before = {number: signal.signal(number, interrupt.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
