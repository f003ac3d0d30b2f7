"""From scores to the rewards that advantages are estimated from: scale, length penalty, normalisation, KL penalty."""

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
"""[B] response lengths in tokens -> [B] what is added to the score, 0 or below."""


@dataclass(frozen=True)
class RewardShaping:
    """Changes the scores of rows that have one; at most one of the two normalisations is on."""

    length_penalty: LengthPenalty | None = None
    running: RunningRewardNormalizer | None = None
    """Normalises by all scores so far, those of this step included."""
    per_batch: bool = False
    """Normalises by the scores of this step."""
    scale: float = 1.0
    """Factor of every score, before anything else."""

    def apply(self, batch: TrainBatch) -> dict[str, float]:
        """Set `token_level_rewards` from `token_level_scores`, on the last token of each row; returns metrics."""
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
        """The running statistics, if there are any."""
        return self.running.state_dict() if self.running else {}

    def load_state_dict(self, state: StateDict) -> None:
        """Take over the running statistics; normalisation that a resumed run switches on starts afresh."""
        if self.running and state:
            self.running.load_state_dict(state)


def penalty_metrics(penalty: Tensor) -> dict[str, float]:
    """The size and the frequency of the length penalty; nothing where no row has a score."""
    if not len(penalty):
        return {}
    return {
        "reward/overlong_penalty_mean": float(penalty.double().mean()),
        "reward/overlong_fraction": float((penalty < 0).double().mean()),
    }


@dataclass(frozen=True)
class KLReward:
    """Takes ``coefficient * kl`` off the reward of each token; the controller adapts after each step."""

    controller: FixedKLController | AdaptiveKLController
    kind: str

    def apply(self, batch: TrainBatch) -> dict[str, float]:
        """Lower `token_level_rewards` by the KL from the reference; returns metrics."""
        coefficient, mask = self.controller.value, batch.response_mask
        if self.kind == "full":
            kl_of_tokens = filled(batch.full_kl)
        else:
            kl_of_tokens = kl_penalty(filled(batch.old_log_probs), filled(batch.ref_log_probs), self.kind, mask)
        batch.token_level_rewards, kl = apply_kl_penalty(
            filled(batch.token_level_rewards), kl_of_tokens, mask, kl_coef=coefficient
        )
        self.controller.update(float(kl), int(batch.scored.sum()))
        return {"actor/reward_kl_penalty": float(kl), "actor/reward_kl_penalty_coeff": coefficient}

    def state_dict(self) -> StateDict:
        """The controller's state."""
        return self.controller.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Take over the controller's state."""
        self.controller.load_state_dict(state)
