"""Scores responses by a learned reward model, alone or with the rules and functions of a pool beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tether.rewards.outcome import RewardError, RewardOutcome, RewardRequest, Score, is_float32
from tether.rewards.service.local import LocalRewards
from tether.rewards.service.pool import RewardPool
from tether.types import ExtraInfo

ScoreAll = Callable[[Sequence[RewardRequest]], Sequence[float | RewardError]]
"""Scores of all requests, in their order, or why one has none."""


class ModelRewards:
    """Has the methods of a `RewardPool`; the model runs once over everything submitted.

    Args:
        model: scores requests, in this process.
        rules: score the same requests in processes of their own meanwhile; None: the model alone decides.
        rule_weight: factor of their scores. A row has a score where both parts have one.
    """

    def __init__(self, model: ScoreAll, rules: RewardPool | LocalRewards | None, rule_weight: float) -> None:
        self._model, self._rules, self._rule_weight = model, rules, rule_weight
        self._requests: dict[int, RewardRequest] = {}
        self.durations: list[float] = []

    def submit(self, index: int, request: RewardRequest) -> None:
        """See `RewardPool.submit`."""
        self._requests[index] = request
        if self._rules:
            self._rules.submit(index, request)

    def collect(self) -> list[RewardOutcome]:
        """See `RewardPool.collect`."""
        requests = [self._requests[index] for index in sorted(self._requests)]
        self._requests.clear()
        begun = time.monotonic()
        scores = self._model(requests)
        share = (time.monotonic() - begun) / max(len(requests), 1)
        outcomes = [_checked(score) for score in scores]
        self.durations = [share] * len(requests)
        if self._rules:
            pairs = zip(outcomes, self._rules.collect(), strict=True)
            outcomes = [self._sum(model, rule) for model, rule in pairs]
            self.durations = [share + seconds for seconds in self._rules.durations]
        return outcomes

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """See `RewardPool.score`."""
        for index, request in enumerate(requests):
            self.submit(index, request)
        return self.collect()

    def close(self) -> None:
        """End the processes of the rules."""
        if self._rules:
            self._rules.close()

    def __enter__(self) -> ModelRewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sum(self, model: RewardOutcome, rule: RewardOutcome) -> RewardOutcome:
        """Of the two scores; else the error of one, else the abstention."""
        if not isinstance(model, Score) or not isinstance(rule, Score):
            return rule if isinstance(model, Score) or isinstance(rule, RewardError) else model
        extra = rule.extra | {"model_score": model.value, "rule_score": rule.value}
        return _checked(model.value + self._rule_weight * rule.value, extra)


def _checked(score: float | RewardError, extra: ExtraInfo | None = None) -> RewardOutcome:
    if isinstance(score, RewardError):
        return score
    if not is_float32(score):
        return RewardError(f"the reward model gave {score}, which is no score: a score is finite and fits into float32")
    return Score(score, extra or {})


Rewards = RewardPool | LocalRewards | ModelRewards
