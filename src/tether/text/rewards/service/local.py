"""Scoring by a function object in this process.

A timeout stops Python code, but no call into C. A function that hangs in C, exits or exhausts the memory ends the run;
a function from a file therefore runs in separate processes (`tether.text.rewards.service.pool`).
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tether.runtime.deadline import deadline
from tether.runtime.global_rng import python_seeded
from tether.text.rewards.outcome import RewardError, RewardOutcome, RewardRequest, dump_answer, load_answer
from tether.text.rewards.router import RewardFunction
from tether.text.rewards.service.protocol import Rewards
from tether.text.rewards.service.worker import call

_USE_A_FILE = "signals do not work with trainer.async_mode: put the function into a file (custom_reward_function.path)"


class LocalRewards(Rewards):
    """Calls a function in this process. `submit` calls the function immediately.

    Args:
        function: function with the same arguments as in a `RewardPool`.
        timeout: maximum seconds of a call.
        in_thread: never calls the function in the main thread. With asynchronous sampling it runs in another thread,
            where functions that use signals fail; this makes them fail in the preflight already.
    """

    def __init__(self, function: RewardFunction, timeout: float, *, in_thread: bool = False) -> None:
        self._function, self._timeout = function, timeout
        self._thread = ThreadPoolExecutor(1, "reward") if in_thread else None
        self._done: dict[int, tuple[RewardOutcome, float]] = {}
        self.durations: list[float] = []

    def submit(self, index: int, request: RewardRequest) -> None:
        if self._thread and threading.current_thread() is threading.main_thread():
            self._thread.submit(self._call, index, request).result()
        else:
            self._call(index, request)

    def _call(self, index: int, request: RewardRequest) -> None:
        start = time.monotonic()
        with python_seeded(request.solution_str), deadline(self._timeout):  # as in the pool
            outcome = call(self._function, request)
        is_main = threading.current_thread() is threading.main_thread()
        if isinstance(outcome, RewardError) and "signal" in outcome.message and not is_main:
            outcome = replace(outcome, message=f"{_USE_A_FILE}; {outcome.message}")
        self._done[index] = load_answer(dump_answer(outcome, time.monotonic() - start))

    def collect(self) -> list[RewardOutcome]:
        done = [self._done[index] for index in sorted(self._done)]
        self._done.clear()
        self.durations = [seconds for _, seconds in done]
        return [outcome for outcome, _ in done]

    def close(self) -> None:
        if self._thread:
            self._thread.shutdown()
