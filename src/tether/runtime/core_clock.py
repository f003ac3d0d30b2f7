"""Detects whether other programs kept this process from the CPU cores, so that its timings are too long."""

from __future__ import annotations

import time
from pathlib import Path

TASKS = Path("/proc/self/task")
"""Linux's folder with one folder for each thread of this process."""
BUSY = 0.1
"""Share of waiting time above which the machine is too busy for valid timings."""


class CoreClock:
    """Measures how long the threads of this process have waited for a core since the clock was created."""

    def __init__(self) -> None:
        self._ran, self._waited = time.process_time(), _waited()

    def wait_fraction(self) -> float | None:
        """Return the share of the time in which runnable threads waited for a core; None if not on Linux."""
        ran, waited = time.process_time() - self._ran, _waited()
        if waited is None or self._waited is None:
            return None
        waited = max(0.0, waited - self._waited)  # threads that have ended are no longer counted
        return waited / (ran + waited) if ran + waited else 0.0


def _waited() -> float | None:
    """Return the total seconds that the threads of this process were runnable but waited for a core."""
    nanoseconds = []
    for file in TASKS.glob("*/schedstat"):
        try:
            nanoseconds.append(int(file.read_text().split()[1]))
        except (OSError, ValueError, IndexError):  # a thread that has just ended
            continue
    return sum(nanoseconds) / 1e9 if nanoseconds else None
