"""Scores responses with a server, by concurrent requests that overlap with generation."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

from tether.runtime.interrupt import raise_if_interrupted
from tether.text.rewards.outcome import RewardError, RewardOutcome, RewardRequest
from tether.text.rewards.service.endpoint import EndpointError
from tether.text.rewards.service.protocol import Rewards

ScoreOne = Callable[[RewardRequest], RewardOutcome]


class RemoteRewards(Rewards):
    """Queries a server from threads of this process.

    Args:
        score: queries the server about one response. It needs a timeout; an `EndpointError` is an error of the row.
        max_concurrent: maximum number of concurrent requests.
    """

    def __init__(self, score: ScoreOne, max_concurrent: int) -> None:
        self._score, self.max_concurrent = score, max_concurrent
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="reward-server")
        self._submitted: dict[int, Future[tuple[RewardOutcome, float]]] = {}
        self.durations: list[float] = []

    def submit(self, index: int, request: RewardRequest) -> None:
        assert index not in self._submitted, f"request {index} was submitted twice"
        self._submitted[index] = self._threads.submit(self._timed, request)

    def collect(self) -> list[RewardOutcome]:
        futures, self._submitted = self._submitted, {}
        done = [_wait(futures[index]) for index in sorted(futures)]
        self.durations = [seconds for _, seconds in done]
        return [outcome for outcome, _ in done]

    def close(self) -> None:
        """Cancel queued requests; running ones end at their timeout."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _timed(self, request: RewardRequest) -> tuple[RewardOutcome, float]:
        start = time.monotonic()
        try:
            outcome = self._score(request)
        except EndpointError as error:
            outcome = RewardError(str(error))
        return outcome, time.monotonic() - start


def _wait(future: Future[tuple[RewardOutcome, float]]) -> tuple[RewardOutcome, float]:
    start = time.monotonic()
    while True:
        try:
            return future.result(timeout=1.0)
        except NotYet:
            if future.done():  # the call itself raised a TimeoutError
                raise
            raise_if_interrupted(start, "the server that scores responses gave no answer")
