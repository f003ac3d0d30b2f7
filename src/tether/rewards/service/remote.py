"""Scores responses by what a server says about each, many at once, while generation still runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

from tether.rewards.outcome import RewardError, RewardOutcome, RewardRequest
from tether.rewards.service.endpoint import EndpointError
from tether.runtime.interrupt import give_up_if_interrupted

ScoreOne = Callable[[RewardRequest], RewardOutcome]


class RemoteRewards:
    """Has the methods of a `RewardPool`; threads of this process wait for the server.

    Args:
        score: asks the server about one response; its `EndpointError` is an error of the row. It must end by itself.
        max_concurrent: requests at once.
    """

    def __init__(self, score: ScoreOne, max_concurrent: int) -> None:
        self._score, self.max_concurrent = score, max_concurrent
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="reward-server")
        self._submitted: dict[int, Future[tuple[RewardOutcome, float]]] = {}
        self.durations: list[float] = []

    def submit(self, index: int, request: RewardRequest) -> None:
        """See `RewardPool.submit`."""
        assert index not in self._submitted, f"request {index} was submitted twice"
        self._submitted[index] = self._threads.submit(self._timed, request)

    def collect(self) -> list[RewardOutcome]:
        """See `RewardPool.collect`.

        Raises:
            Interrupted: a signal asks the run to stop, and the server takes long.
        """
        waiting, self._submitted = self._submitted, {}
        done = [_wait(waiting[index]) for index in sorted(waiting)]
        self.durations = [seconds for _, seconds in done]
        return [outcome for outcome, _ in done]

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """See `RewardPool.score`."""
        for index, request in enumerate(requests):
            self.submit(index, request)
        return self.collect()

    def close(self) -> None:
        """Ask nothing more; what was asked is left to its deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> RemoteRewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _timed(self, request: RewardRequest) -> tuple[RewardOutcome, float]:
        begun = time.monotonic()
        try:
            outcome = self._score(request)
        except EndpointError as error:
            outcome = RewardError(str(error))
        return outcome, time.monotonic() - begun


def _wait(future: Future[tuple[RewardOutcome, float]]) -> tuple[RewardOutcome, float]:
    since = time.monotonic()
    while True:
        try:
            return future.result(timeout=1.0)
        except NotYet:
            if future.done():  # a TimeoutError of the call itself
                raise
            give_up_if_interrupted(since, "the server that scores responses gave no answer")
