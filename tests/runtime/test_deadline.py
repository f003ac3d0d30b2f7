"""A deadline in a thread that is not the main one, where an exception is raised from outside."""

import subprocess
import sys
import threading
import time
from pathlib import Path

from tether.runtime.deadline import deadline

ROOT = Path(__file__).parents[2]
TRACED = """
import sys, threading
from tether.runtime.deadline import deadline

def ends():
    with deadline(60):
        pass

thread = threading.Thread(target=ends)
thread.start()
thread.join()
sys.settrace(lambda *event: None)
(lambda: None)()
print("done")
"""


def test_functions_can_be_traced_behind_it() -> None:
    """As debuggers and coverage do. Python 3.11 called none to its end once an exception had been withdrawn."""
    environment = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", TRACED], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "done\n", done.stderr


def test_nothing_is_raised_behind_it() -> None:
    """Whenever the timer fires: before the end of the block, at it, or behind it."""
    ended: list[bool] = []

    def work() -> None:
        for wait in range(200):
            late = False
            try:
                with deadline(0.001):
                    time.sleep(wait / 100_000)
            except TimeoutError:
                late = True
            for _ in range(1000):
                pass
            ended.append(late)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(ended) == 200
    assert not all(ended)
    assert any(ended)


def test_code_that_does_not_end_is_interrupted() -> None:
    errors: list[str] = []

    def work() -> None:
        try:
            with deadline(0.05):
                while True:
                    pass
        except TimeoutError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == ["not done after 0.05 seconds"]
