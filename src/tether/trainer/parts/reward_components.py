"""Several numbers that the reward gives a response, each a component of its own (GDPO, arXiv 2601.05242)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tether.batch import TrainBatch
from tether.metrics.data import group_metrics
from tether.rewards import RewardOutcome, Score, is_float32


@dataclass(frozen=True)
class RewardComponents:
    """Reads them out of the dict that the reward returns."""

    keys: tuple[str, ...]
    """Names in that dict; ``score`` is the score itself."""

    def add_to(self, batch: TrainBatch, outcomes: Sequence[RewardOutcome]) -> dict[str, float]:
        """Set `reward_components`, 0 for rows without a score; returns how much each varies within groups.

        Args:
            batch: the rows that were scored.
            outcomes: what the reward said of each.

        Raises:
            ValueError: a scored response has no such component, or it is no number that float32 holds.
        """
        batch.reward_components = torch.tensor([self._of(row, outcome) for row, outcome in enumerate(outcomes)])
        metrics: dict[str, float] = {}
        for key, values in zip(self.keys, batch.reward_components.unbind(dim=1), strict=True):
            found = group_metrics(values, batch.uid, batch.scored)
            metrics |= {name.replace("group/", f"gdpo/{key}/"): value for name, value in found.items()}
        return metrics

    def _of(self, row: int, outcome: RewardOutcome) -> list[float]:
        if not isinstance(outcome, Score):
            return [0.0] * len(self.keys)
        numbers = {"score": outcome.value, **outcome.extra}
        return [_number(numbers, key, row) for key in self.keys]


def _number(numbers: dict[str, object], key: str, row: int) -> float:
    value = numbers.get(key)
    if isinstance(value, int | float) and is_float32(value):
        return float(value)
    what = (
        f"{value!r}, which is no number in float32"
        if key in numbers
        else f"nothing of that name, only {', '.join(numbers)}"
    )
    raise ValueError(
        f"algorithm.gdpo_reward_keys: for {key!r} the reward returned {what} (response {row} of the step). Let it "
        "return each component with every score, as a number in its dict, or take the name out of the list."
    )
