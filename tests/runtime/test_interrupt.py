"""The first signal asks, the second stops at once and says what that costs."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import signal, time
from tether.runtime.interrupt import graceful_interrupt
with graceful_interrupt() as interrupted:
    signal.raise_signal(signal.{name})
    assert interrupted() and interrupted.signal == signal.{name}
    if {again}:
        signal.raise_signal(signal.{name})
print("finished the step")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_second_signal_stops_at_once_and_says_so(name: str) -> None:
    def run(*, again: bool) -> subprocess.CompletedProcess[str]:
        code = CODE.format(name=name, again=again)
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    asked, told = run(again=False), run(again=True)
    assert asked.returncode == 0
    assert asked.stdout == "finished the step\n"
    assert f"{name}: finishing this step, then saving a checkpoint. Once more stops at once." in asked.stderr
    assert told.returncode == -getattr(signal, name)
    assert f"{name} again: stopping now; the steps since the last checkpoint are lost." in told.stderr


REPLACED = """
import io, sys, signal
from tether.runtime.interrupt import Interrupted, graceful_interrupt
class Tee:
    def write(self, text): raise ValueError("its file is closed")
class Odd(Tee):
    def fileno(self): return None
closed = open("/dev/null")
closed.close()
for stream in (Tee(), Odd(), None, io.StringIO(), closed):
    sys.stderr = stream
    with graceful_interrupt() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        raise Interrupted("a process gave no answer")
"""


def test_whatever_stands_for_standard_error_the_step_goes_on() -> None:
    """Sacred, notebooks and services put objects of their own there, or nothing."""
    done = subprocess.run([sys.executable, "-c", REPLACED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr.count("SIGINT: finishing this step") == 5
    assert done.stderr.count("gave no answer; the run resumes from its last checkpoint") == 5


HANGUPS = """
import signal
from tether.runtime.interrupt import graceful_interrupt
{before}
with graceful_interrupt() as interrupted:
    for name in {names}:
        signal.raise_signal(signal.Signals[name])
    print(interrupted.signal and interrupted.signal.name)
"""

AS_IN_A_TERMINAL = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"
"""Also where the tests themselves run under nohup."""


@pytest.mark.parametrize(
    ("names", "remembered"),
    [
        (["SIGHUP"], "SIGHUP"),
        (["SIGHUP", "SIGHUP", "SIGHUP"], "SIGHUP"),
        (["SIGTERM", "SIGHUP"], "SIGTERM"),
        (["SIGHUP", "SIGTERM", "SIGHUP"], "SIGTERM"),
    ],
)
def test_a_closed_terminal_asks_and_never_insists(names: list[str], remembered: str) -> None:
    code = HANGUPS.format(before=AS_IN_A_TERMINAL, names=names)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{remembered}\n"


def test_after_a_closed_terminal_two_more_signals_stop_at_once() -> None:
    code = HANGUPS.format(before=AS_IN_A_TERMINAL, names=["SIGHUP", "SIGTERM", "SIGTERM"])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == -signal.SIGTERM


def test_under_nohup_a_closed_terminal_means_nothing() -> None:
    code = HANGUPS.format(before="signal.signal(signal.SIGHUP, signal.SIG_IGN)", names=["SIGHUP"])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
