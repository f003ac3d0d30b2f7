"""Programs as rewards: what the sandbox costs beside plain processes, and whether many runs leave anything behind.

python -m benchmarks.sandbox [--runs 10000]
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import psutil

from benchmarks.speed.machine import machine_line
from tether.text.rewards.outcome import RewardRequest
from tether.text.rewards.sandbox import Limits, ProgramOptions
from tether.text.rewards.sandbox.bubblewrap import confinement_advice
from tether.text.rewards.sandbox.languages import LANGUAGES
from tether.text.rewards.sandbox.limits import Program
from tether.text.rewards.sandbox.run import run
from tether.text.rewards.service import RewardPool

LIMITS = Limits(seconds=6.0, memory_mb=1024, processes=64)
PROGRAM = Program(LANGUAGES["python"].run, {"answer.py": b"a, b = map(int, input().split())\nprint(a + b)\n"})
SUM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
TESTS = {"inputs": [f"{n} 1\n" for n in range(10)], "outputs": [f"{n + 1}\n" for n in range(10)]}


def runs_per_second(count: int, at_once: int, *, confined: bool) -> float:
    """Runs of a small Python program, several at once."""

    def once(number: int) -> None:
        ended = run(PROGRAM, f"{number} 1\n".encode(), LIMITS, confined=confined)
        assert ended.stdout == f"{number + 1}\n".encode(), ended

    with ThreadPoolExecutor(at_once) as threads:
        begun = time.perf_counter()
        list(threads.map(once, range(count)))
        return count / (time.perf_counter() - begun)


def start_ms(runs: int = 100) -> tuple[float, float]:
    """Medians of milliseconds from the start to the end of `true`, as a plain process and in the sandbox, in turns."""
    took: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(runs):
        for confined, times in took.items():
            begun = time.perf_counter()
            assert run(Program(("/usr/bin/true",)), b"", LIMITS, confined=confined).succeeded
            times.append(1e3 * (time.perf_counter() - begun))
    return median(took[False]), median(took[True])


def left_behind() -> dict[str, int]:
    """Leftovers of runs: processes below this one, descriptors, mounts, folders, and memory in MiB."""
    own = psutil.Process()
    return {
        "processes": len(own.children(recursive=True)),
        "descriptors": own.num_fds(),
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "folders in /tmp": len([name for name in os.listdir("/tmp") if name.startswith("tether-program-")]),
        "MiB": own.memory_info().rss >> 20,
    }


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000, help="runs that must leave nothing")
    options = parser.parse_args()
    if reason := confinement_advice():
        raise SystemExit(reason)
    print(machine_line())
    print("start and end of a program that does nothing: {:.0f} ms plain, {:.0f} ms in the sandbox".format(*start_ms()))
    for at_once in (1, 2, 4):
        plain, confined = (runs_per_second(200, at_once, confined=confined) for confined in (False, True))
        print(f"{at_once} at once: {plain:.0f} plain runs a second, {confined:.0f} in the sandbox")
    rows = [RewardRequest("apps", SUM, TESTS)] * 20
    with RewardPool(num_workers=2, timeout=60, programs=ProgramOptions(limits=LIMITS)) as pool:
        pool.score(rows[:2])
        begun = time.perf_counter()
        outcomes = pool.score(rows)
        print(f"rows of 10 tests, 2 reward processes: {len(rows) / (time.perf_counter() - begun):.1f} a second")
        assert len(set(map(str, outcomes))) == 1
    before = left_behind()
    speed = runs_per_second(options.runs, 4, confined=True)
    print(f"{options.runs} runs ({speed:.0f} a second): before {before}, after {left_behind()}")


if __name__ == "__main__":
    main()
