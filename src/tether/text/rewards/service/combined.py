"""Several rewards at once: the score of a response is their weighted sum, and each is logged separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tether.text.rewards.outcome import Abstention, RewardError, RewardOutcome, RewardRequest, Score, is_float32
from tether.text.rewards.service.protocol import Rewards


@dataclass(frozen=True)
class WeightedReward:
    """One of the rewards in a sum."""

    rewards: Rewards
    weight: float = 1.0
    """Factor of the score; 0: the score is only logged."""
    optional: bool = False
    """Whether the sum of the other rewards is the score if this one abstains; otherwise the sum abstains, too."""
    data_sources: frozenset[str] | None = None
    """Data sources of the responses that it scores; None: all."""

    def scores(self, request: RewardRequest) -> bool:
        """Return whether this reward scores the response."""
        return self.data_sources is None or request.data_source in self.data_sources


class CombinedRewards(Rewards):
    """Returns the weighted sum of several rewards.

    Args:
        rewards: rewards by name, at least one. Extra values of the first one keep their names (`acc`, `pred`) unless a
            reward has the same name; those of the others are prefixed with the name of their reward.
    """

    def __init__(self, rewards: Mapping[str, WeightedReward]) -> None:
        self._rewards = dict(rewards)
        self._submitted: dict[int, list[str]] = {}
        self.durations: list[float] = []

    def submit(self, index: int, request: RewardRequest) -> None:
        names = [name for name, reward in self._rewards.items() if reward.scores(request)]
        assert names, f"no part of the reward scores data_source {request.data_source!r}"
        self._submitted[index] = names
        for name in names:
            self._rewards[name].rewards.submit(index, request)

    def collect(self) -> list[RewardOutcome]:
        submitted, self._submitted = self._submitted, {}
        outcomes = {name: iter(reward.rewards.collect()) for name, reward in self._rewards.items()}
        seconds = {name: iter(reward.rewards.durations) for name, reward in self._rewards.items()}
        rows = [submitted[index] for index in sorted(submitted)]
        self.durations = [max(next(seconds[name]) for name in names) for names in rows]
        return [self._sum({name: next(outcomes[name]) for name in names}) for names in rows]

    def close(self) -> None:
        for reward in self._rewards.values():
            reward.rewards.close()

    def _sum(self, outcomes: Mapping[str, RewardOutcome]) -> RewardOutcome:
        """Return the weighted sum of a row, the first error, or an abstention."""
        for name, outcome in outcomes.items():
            if isinstance(outcome, RewardError):
                return RewardError(f"part {name}: {outcome.message}", outcome.traceback)
        scored = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Score)}
        abstained = [name for name in outcomes if name not in scored]
        weighted = [name for name in scored if self._rewards[name].weight != 0]
        if not weighted or not all(self._rewards[name].optional for name in abstained):
            return Abstention()
        total = sum(self._rewards[name].weight * scored[name].value for name in weighted)
        if not is_float32(total):
            return RewardError(f"the weighted sum of the parts is {total}, which does not fit into float32")
        first = next(iter(self._rewards))
        extra = {
            key if name == first and key not in self._rewards else f"{name}/{key}": value
            for name, outcome in scored.items()
            for key, value in outcome.extra.items()
        }
        return Score(total, extra | {name: outcome.value for name, outcome in scored.items()})
