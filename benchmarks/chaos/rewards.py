"""Reward functions that crash, hang, lie or attack: each costs its own row at most, and no process outlives it."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.text.rewards import hostile
from tether.text.rewards.custom import CustomReward
from tether.text.rewards.outcome import RewardError, RewardOutcome, RewardRequest, Score
from tether.text.rewards.service.pool import RewardPool

DEADLINE = 1.0
ERRORS = (
    "raises", "raises_unprintable", "exits_politely", "exits_hard", "segfaults", "hangs",
    "hangs_holding_the_interpreter", "ignores_sigterm", "stops_itself", "forks_and_hangs", "leaves_daemon_and_hangs",
    "leaves_daemon_and_exits", "kills_its_group", "kills_its_guard", "closes_its_files", "returns_nan", "returns_text",
    "returns_list", "returns_object", "returns_beyond_float32", "returns_beyond_float64", "returns_too_much",
    "returns_what_is_slow_to_read", "leaves_a_thread_with_the_interpreter", "writes_zeros_everywhere",
    "writes_one_byte_everywhere", "writes_a_pickle_everywhere",
)  # fmt: skip
"""The row of each has to be an error, and never a score."""
FINE = (
    "leaves_daemon", "leaves_children", "returns_twice", "prints", "reads_stdin", "huge_output", "returns_none",
    "returns_extra", "returns_enums", "returns_what_runs_code", "returns_itself", "returns_long_integer",
    "returns_surrogate", "returns_most",
)  # fmt: skip
"""These answer after all, with a score or by abstaining."""


def measure(folder: Path) -> tuple[int, int, list[str]]:
    """Call each function between two calls whose scores are known.

    Returns:
        Functions survived and tried, and a line for each that was not survived.
    """
    failures = []
    before = set(psutil.Process().children(recursive=True))
    with RewardPool(CustomReward(str(Path(hostile.__file__))), num_workers=2, timeout=DEADLINE) as pool:
        for name in (*ERRORS, *FINE):
            extra = {"pids": str(folder / "pids"), "path": str(folder / "mark")}
            first, bad, last = pool.score([_ask("right"), RewardRequest("test", name, "0.5", extra), _ask("right")])
            if (wrong := _judge(name, first, bad, last)) or (folder / "mark").exists():
                failures.append(f"{name}: {wrong or 'code of its result ran in the trainer'}")
    left = [process for process in set(psutil.Process().children(recursive=True)) - before if process.is_running()]
    failures += [f"process {process.pid} outlived the pool" for process in left]
    return len(ERRORS) + len(FINE) - len(failures), len(ERRORS) + len(FINE), failures


def _ask(what: str) -> RewardRequest:
    return RewardRequest("test", what, "0.5", {})


def _judge(name: str, first: RewardOutcome, bad: RewardOutcome, last: RewardOutcome) -> str | None:
    if not first == last == Score(0.5):
        return f"its neighbours got {first} and {last}"
    if isinstance(bad, RewardError) != (name in ERRORS):
        return f"its row is {bad}"
    return None
