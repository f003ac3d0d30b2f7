import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tether.text.rewards.rules import bounded as module
from tether.text.rewards.rules.bounded import BoundedProcessKilled, LimitExceeded, bounded


def test_a_result_arrives():
    assert bounded(lambda a, b: a < b, 1, 2) is True
    assert bounded(float, "0.25") == 0.25


@pytest.mark.parametrize(
    "work",
    [
        lambda: 9**9**9 > 0,
        lambda: len(bytearray(b"x") * (8 << 30)) > 0,
        lambda: os.kill(os.getpid(), signal.SIGSEGV),
        lambda: work_without_end(),
    ],
    ids=["time", "memory", "a signal", "the stack"],
)
def test_what_takes_too_much_is_told_apart(work, monkeypatch):
    monkeypatch.setattr(module, "MAX_SECONDS", 0.3)
    begun = time.process_time()
    with pytest.raises(LimitExceeded):
        bounded(work)
    assert time.process_time() - begun < 1  # here


def test_a_profiler_of_the_run_does_not_keep_an_answer_alive(monkeypatch):
    """Its handler of the timer's signal would wait for the end of a power of large numbers."""
    monkeypatch.setattr(module, "MAX_SECONDS", 0.3)
    handler = signal.signal(signal.SIGPROF, lambda *_: None)
    try:
        with pytest.raises(LimitExceeded):
            bounded(lambda: 9**9**9 > 0)
    finally:
        signal.signal(signal.SIGPROF, handler)


def work_without_end():
    return work_without_end()


def test_other_failures_are_said():
    before = children()
    with pytest.raises(RuntimeError, match="ValueError: could not convert"):
        bounded(float, "x")
    with pytest.raises(BoundedProcessKilled, match="ended with status"):
        bounded(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert children() == before


def children() -> str:
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
