"""Seconds, medians of runs that take turns, and the peak of this process's memory."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def seconds(function: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def take_turns(sides: Mapping[str, Callable[[int], float]], runs: int, warm_up: int = 1) -> dict[str, float]:
    """Median seconds of each side.

    Args:
        sides: each is called with the number of the round and returns its seconds; the first rounds do not count.
        runs: rounds that count. The sides alternate within a round, so that what disturbs one disturbs the others.
        warm_up: rounds that do not count.
    """
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warm_up + runs):
        for name, side in sides.items():
            measured[name].append(side(number))
    return {name: statistics.median(times[warm_up:]) for name, times in measured.items()}


def peak_memory(function: Callable[[], object]) -> tuple[float, float]:
    """Resident GiB of this process before the call (what was freed is returned first), and at its peak. Linux only."""
    release()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    function()
    return before, resident("VmHWM")


def release() -> None:
    """Give back what was freed. Linux only."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def resident(key: str) -> float:
    """GiB of this process: ``VmRSS`` now, ``VmHWM`` at its peak since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 2**20
    raise AssertionError(f"/proc/self/status has no {key}")
