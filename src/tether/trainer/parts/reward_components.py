"""Several numbers that the reward returns for a response, as separate components (GDPO, arXiv 2601.05242)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tether.batch import TrainBatch
from tether.metrics.data import group_metrics
from tether.rewards import RewardOutcome, Score, is_float32


@dataclass(frozen=True)
class RewardComponents:
    """Reads the components from the dict that the reward returns."""

    keys: tuple[str, ...]
    """Keys of that dict; ``score`` is the score itself."""

    def add_to(self, batch: TrainBatch, outcomes: Sequence[RewardOutcome]) -> dict[str, float]:
        """Set `reward_components`, 0 for rows without a score, and return metrics of their variation within groups.

        Args:
            batch: the scored rows.
            outcomes: the reward's result for each row.

        Raises:
            ValueError: a component of a scored response is missing, or is not a number in the range of float32.
        """
        batch.reward_components = torch.tensor([self._components(row, outcome) for row, outcome in enumerate(outcomes)])
        metrics: dict[str, float] = {}
        for key, values in zip(self.keys, batch.reward_components.unbind(dim=1), strict=True):
            groups = group_metrics(values, batch.uid, batch.scored)
            metrics |= {name.replace("group/", f"gdpo/{key}/"): value for name, value in groups.items()}
        return metrics

    def _components(self, row: int, outcome: RewardOutcome) -> list[float]:
        if not isinstance(outcome, Score):
            return [0.0] * len(self.keys)
        numbers = {"score": outcome.value, **outcome.extra}
        return [_number(numbers, key, row) for key in self.keys]


def _number(numbers: dict[str, object], key: str, row: int) -> float:
    value = numbers.get(key)
    if isinstance(value, int | float) and is_float32(value):
        return float(value)
    problem = (
        f"{value!r}, which is not a number in the range of float32"
        if key in numbers
        else f"nothing of that name, only {', '.join(numbers)}"
    )
    raise ValueError(
        f"algorithm.gdpo_reward_keys: for {key!r} the reward returned {problem} (response {row} of the step). Let it "
        "return each component with every score, as a number in its dict, or remove the name from the list."
    )
