"""The process beside which tether is measured takes a core only while it is measured."""

import time

import psutil

from benchmarks.speed.busy_process import busy_process


def seconds(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return spent.user + spent.system


def test_a_paused_process_computes_nothing() -> None:
    with busy_process() as process:
        (child,) = (c for c in psutil.Process().children() if "while True: pass" in c.cmdline())
        process.resume()
        deadline = time.monotonic() + 30
        while seconds(child) < 0.1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.pause()
        paused = seconds(child)
        time.sleep(0.3)
        assert seconds(child) == paused
    assert not child.is_running()
