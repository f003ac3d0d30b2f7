"""Scores responses by a model of this process: a learned reward model, or a judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tether.rewards.outcome import RewardError, RewardOutcome, RewardRequest, Score, is_float32

ScoreAll = Callable[[Sequence[RewardRequest]], Sequence[float | RewardOutcome]]
"""Scores of all requests, in their order, or why one has none."""


class ModelRewards:
    """Has the methods of a `RewardPool`; the model runs once over everything submitted.

    Args:
        model: scores requests.
    """

    def __init__(self, model: ScoreAll) -> None:
        self._model = model
        self._requests: dict[int, RewardRequest] = {}
        self.durations: list[float] = []

    def submit(self, index: int, request: RewardRequest) -> None:
        """See `RewardPool.submit`."""
        self._requests[index] = request

    def collect(self) -> list[RewardOutcome]:
        """See `RewardPool.collect`."""
        requests = [self._requests[index] for index in sorted(self._requests)]
        self._requests.clear()
        begun = time.monotonic()
        outcomes = [_checked(score) for score in self._model(requests)]
        self.durations = [(time.monotonic() - begun) / max(len(requests), 1)] * len(requests)
        return outcomes

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """See `RewardPool.score`."""
        for index, request in enumerate(requests):
            self.submit(index, request)
        return self.collect()

    def close(self) -> None:
        """There is nothing to end."""

    def __enter__(self) -> ModelRewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked(score: float | RewardOutcome) -> RewardOutcome:
    if not isinstance(score, int | float):
        return score
    if not is_float32(score):
        return RewardError(f"the reward model gave {score}, which is no score: a score is finite and fits into float32")
    return Score(score)
