"""A process that takes a core from the others, for measurements on a machine that is shared."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

SETTLING_SECONDS = 0.05


class BusyProcess:
    """A process that always wants a core, except while it is paused."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        self.pause()

    def pause(self) -> None:
        """Stop it until `resume` is called."""
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(SETTLING_SECONDS)

    def resume(self) -> None:
        """Let it compute."""
        self._process.send_signal(signal.SIGCONT)
        time.sleep(SETTLING_SECONDS)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


@contextmanager
def busy_process() -> Iterator[BusyProcess]:
    """Start a busy process, paused; it ends with the context."""
    process = BusyProcess()
    try:
        yield process
    finally:
        process.close()
