"""A deadline for calls in this process."""

import signal
import threading
import time

import pytest

from tether.runtime import late_calls
from tether.runtime.late_calls import CallWatchdog


def test_a_call_that_is_late_ends() -> None:
    calls = CallWatchdog(0.1, "late")
    calls.begin()
    with pytest.raises(RuntimeError, match="late"):
        time.sleep(20)
    calls.end()
    calls.close()


def test_the_signal_has_its_handler_again_after_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(*_: object) -> None: ...

    monkeypatch.setattr(late_calls, "_watching", set())  # another test may have left one
    before = signal.signal(signal.SIGURG, handler)
    first, second = CallWatchdog(1, "late"), CallWatchdog(1, "late")
    first.close()
    assert signal.getsignal(signal.SIGURG) is not handler
    second.close()
    second.close()
    assert signal.signal(signal.SIGURG, before) is handler


def test_nothing_is_raised_behind_a_call_that_ends_when_it_is_found_late(monkeypatch: pytest.MonkeyPatch) -> None:
    kill, was_sent = signal.pthread_kill, threading.Event()

    def end_and_kill(thread: int, number: int) -> None:
        calls.end()
        kill(thread, number)
        was_sent.set()

    monkeypatch.setattr(signal, "pthread_kill", end_and_kill)
    calls = CallWatchdog(0.1, "late")
    calls.begin()
    assert was_sent.wait(20)
    time.sleep(0.1)
    calls.close()
