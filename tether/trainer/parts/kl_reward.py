"""KL to the reference as a penalty in the reward (InstructGPT, arXiv 2203.02155)."""

from __future__ import annotations

from dataclasses import dataclass

from tether.algorithms import AdaptiveKLController, FixedKLController, apply_kl_penalty
from tether.batch import TrainBatch, filled
from tether.types import StateDict


@dataclass(frozen=True)
class KLReward:
    """Takes ``coefficient * kl`` off the reward of each token; the controller adapts after each step."""

    controller: FixedKLController | AdaptiveKLController
    kind: str

    def apply(self, batch: TrainBatch) -> dict[str, float]:
        """Lower `token_level_rewards` by the KL of `old_log_probs` to `ref_log_probs`; returns metrics."""
        coefficient = self.controller.value
        batch.token_level_rewards, kl = apply_kl_penalty(
            filled(batch.token_level_rewards),
            filled(batch.old_log_probs),
            filled(batch.ref_log_probs),
            batch.response_mask,
            kl_coef=coefficient,
            kind=self.kind,
        )
        self.controller.update(float(kl), int(batch.scored.sum()))
        return {"actor/reward_kl_penalty": float(kl), "actor/reward_kl_penalty_coeff": coefficient}

    def state_dict(self) -> StateDict:
        """The controller's state."""
        return self.controller.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Take over the controller's state."""
        self.controller.load_state_dict(state)
