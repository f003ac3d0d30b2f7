"""Scoring by a model in this process: a learned reward model, or a judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tether.text.rewards.outcome import RewardError, RewardOutcome, RewardRequest, Score, is_float32
from tether.text.rewards.service.protocol import Rewards

ScoreAll = Callable[[Sequence[RewardRequest]], Sequence[float | RewardOutcome]]
"""Requests -> their scores or outcomes, in order."""


class ModelRewards(Rewards):
    """Scores all requests with one call of a model."""

    def __init__(self, model: ScoreAll) -> None:
        self._model = model
        self._requests: dict[int, RewardRequest] = {}
        self.durations: list[float] = []

    def submit(self, index: int, request: RewardRequest) -> None:
        self._requests[index] = request

    def collect(self) -> list[RewardOutcome]:
        requests = [self._requests[index] for index in sorted(self._requests)]
        self._requests.clear()
        start = time.monotonic()
        outcomes = [_outcome(score) for score in self._model(requests)]
        self.durations = [(time.monotonic() - start) / max(len(requests), 1)] * len(requests)
        return outcomes


def _outcome(score: float | RewardOutcome) -> RewardOutcome:
    if not isinstance(score, int | float):
        return score
    if not is_float32(score):
        return RewardError(f"the reward model returned {score}; a score must be finite and fit into float32")
    return Score(score)
