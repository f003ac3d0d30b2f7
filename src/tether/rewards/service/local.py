"""Scores responses in this process, by a function that is an object of it.

A call that takes too long is stopped: Python code, and no call into C. What hangs, exits or eats memory there takes the
run along: a function of a file has processes of its own (`tether.rewards.service.pool`).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from tether.rewards.outcome import RewardError, RewardOutcome, RewardRequest, dump_answer, load_answer
from tether.rewards.router import RewardFunction
from tether.rewards.service.worker import call
from tether.runtime.deadline import deadline

_USE_A_FILE = (
    "signals do not work here, with trainer.async_mode: put the function into a file (custom_reward_function.path)"
)


class LocalRewards:
    """Has the methods of a `RewardPool`; `submit` calls the function at once.

    Args:
        function: called as in the pool.
        timeout: seconds that a call may take.
    """

    def __init__(self, function: RewardFunction, timeout: float) -> None:
        self._function, self._timeout = function, timeout
        self._done: dict[int, tuple[RewardOutcome, float]] = {}
        self.durations: list[float] = []

    def submit(self, index: int, request: RewardRequest) -> None:
        """See `RewardPool.submit`."""
        noise, begun = random.getstate(), time.monotonic()
        random.seed(request.solution_str)  # as in the pool
        try:
            with deadline(self._timeout):
                outcome = call(self._function, request)
        finally:
            random.setstate(noise)
        is_main = threading.current_thread() is threading.main_thread()
        if isinstance(outcome, RewardError) and "signal" in outcome.message and not is_main:
            outcome = replace(outcome, message=f"{_USE_A_FILE}; {outcome.message}")
        self._done[index] = load_answer(dump_answer(outcome, time.monotonic() - begun))

    def collect(self) -> list[RewardOutcome]:
        """See `RewardPool.collect`."""
        done = [self._done[index] for index in sorted(self._done)]
        self._done.clear()
        self.durations = [seconds for _, seconds in done]
        return [outcome for outcome, _ in done]

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """See `RewardPool.score`."""
        for index, request in enumerate(requests):
            self.submit(index, request)
        return self.collect()

    def close(self) -> None:
        """There is nothing to end."""

    def __enter__(self) -> LocalRewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
