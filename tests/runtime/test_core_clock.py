"""The share of waiting for cores, from what Linux counts of each thread."""

import subprocess
import sys
from pathlib import Path

import pytest

from tether.runtime import core_clock
from tether.runtime.core_clock import CoreClock


def test_waiting_is_read_off_each_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads waited 2 s before the clock was made and 5 s afterwards; this process runs for much less."""
    files = [tmp_path / thread / "schedstat" for thread in ("7", "8")]
    for file in files:
        file.parent.mkdir()
        file.write_text("9000000000 1000000000 17\n")
    monkeypatch.setattr(core_clock, "TASKS", tmp_path)
    clock = CoreClock()
    assert clock.wait_fraction() == 0.0
    files[0].write_text("9000000000 6000000000 18\n")
    files[1].write_text("")  # a thread that is ending
    assert 0.9 < (clock.wait_fraction() or 0.0) < 1.0
    monkeypatch.setattr(core_clock, "TASKS", tmp_path / "not there")
    assert clock.wait_fraction() is None


PROGRAM = """
import os, time
from tether.runtime.core_clock import CoreClock
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
child = os.fork()
clock, end = CoreClock(), time.perf_counter() + 0.3
while time.perf_counter() < end:
    pass
os.write(1, f"{clock.wait_fraction()}\\n".encode())  # both in one piece
if child:
    os.waitpid(child, 0)
"""
"""Two processes that compute on the same core."""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's counters")
def test_two_processes_on_one_core_wait_for_each_other() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    shares = [float(line) for line in done.stdout.splitlines()]
    assert len(shares) == 2
    assert sum(shares) > 0.6
