"""The steps from scores to the rewards of the estimator: scale, length penalty, normalisation, KL penalty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tether.algorithms import (
    AdaptiveKLController,
    FixedKLController,
    RunningRewardNormalizer,
    apply_kl_penalty,
    kl_penalty,
    masked_sum,
    normalize_rewards_per_batch,
)
from tether.batch import TrainBatch, filled, on_last_token
from tether.types import StateDict

LengthPenalty = Callable[[Tensor], Tensor]
"""Maps response lengths [B] in tokens to what is added to the scores [B], which is at most 0."""


@dataclass(frozen=True)
class RewardShaping:
    """Shapes the scores of rows that have one; at most one of the two normalisations is enabled."""

    length_penalty: LengthPenalty | None = None
    running: RunningRewardNormalizer | None = None
    """Normalises by all scores so far, including those of this step."""
    per_batch: bool = False
    """Whether to normalise by the scores of this step."""
    scale: float = 1.0
    """A factor that is applied to every score first."""

    def apply(self, batch: TrainBatch) -> dict[str, float]:
        """Set `token_level_rewards` from `token_level_scores`, on the last token of each row, and return metrics."""
        metrics: dict[str, float] = {}
        scores = self.scale * masked_sum(batch.token_level_scores, batch.response_mask, dim=-1)
        if self.length_penalty:
            penalty = self.length_penalty(batch.response_length)
            scores = scores + penalty
            metrics |= penalty_metrics(penalty[batch.scored])
        if self.running:
            self.running.update(scores, batch.scored)
            scores = self.running.normalize(scores, batch.scored)
            metrics |= {"reward/running_mean": self.running.mean, "reward/running_std": self.running.std}
        if self.per_batch:
            scores = normalize_rewards_per_batch(scores, batch.scored)
        batch.token_level_rewards = on_last_token(scores, batch.response_mask)
        return metrics

    def state_dict(self) -> StateDict:
        """Return the running statistics, if there are any."""
        return self.running.state_dict() if self.running else {}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the running statistics; normalisation that a resumed run enables starts without any."""
        if self.running and state:
            self.running.load_state_dict(state)


def penalty_metrics(penalty: Tensor) -> dict[str, float]:
    """Return metrics of the size and frequency of the length penalty; none if no row has a score."""
    if not len(penalty):
        return {}
    return {
        "reward/overlong_penalty_mean": float(penalty.double().mean()),
        "reward/overlong_fraction": float((penalty < 0).double().mean()),
    }


@dataclass(frozen=True)
class KLReward:
    """Subtracts ``coefficient * kl`` from the reward of each token; the controller adapts after each step."""

    controller: FixedKLController | AdaptiveKLController
    kind: str

    def apply(self, batch: TrainBatch) -> dict[str, float]:
        """Subtract the KL from the reference from `token_level_rewards` and return metrics."""
        coefficient, mask = self.controller.value, batch.response_mask
        if self.kind == "full":
            token_kl = filled(batch.full_kl)
        else:
            token_kl = kl_penalty(filled(batch.old_log_probs), filled(batch.ref_log_probs), self.kind, mask)
        batch.token_level_rewards, kl = apply_kl_penalty(
            filled(batch.token_level_rewards), token_kl, mask, kl_coef=coefficient
        )
        self.controller.update(float(kl), int(batch.scored.sum()))
        return {"actor/reward_kl_penalty": float(kl), "actor/reward_kl_penalty_coeff": coefficient}

    def state_dict(self) -> StateDict:
        """Return the controller's state."""
        return self.controller.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Load the controller's state."""
        self.controller.load_state_dict(state)
