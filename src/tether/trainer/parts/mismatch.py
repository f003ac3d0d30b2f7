"""The warning about a sampler that disagrees with the trainer: every number is finite and nothing fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tether.algorithms import off_policy_metrics
from tether.batch import TrainBatch, filled
from tether.metrics.data import mismatch_metrics
from tether.types import StateDict

MISMATCH = "rollout_corr/k3_kl"
ALARM = "training/rollout_mismatch_alarm"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 5e-3}
"""Largest KL from sampler to trainer (k3 estimate, nats per token) that rounding explains, by number format."""


def mismatch_tolerance(*dtypes: torch.dtype) -> float:
    """The tolerance where sampler and trainer compute in these formats: that of the coarsest."""
    return max(TOLERANCE[dtype] for dtype in dtypes)


def sampler_metrics(batch: TrainBatch) -> dict[str, float]:
    """Distance of the recomputed log-probabilities from the sampler's, over all that was sampled and scored."""
    old, sampler, mask = filled(batch.old_log_probs), batch.rollout_log_probs, batch.response_mask
    if not mask.any():
        return {}
    return off_policy_metrics(old, sampler, mask) | mismatch_metrics(sampler, old, mask)


@dataclass
class MismatchAlarm:
    """Watches every step for a sampler and a trainer that disagree about the same weights and tokens; speaks once.

    Both compute a token's probability, with other kernels and in batches of other shapes, so rounding keeps them a
    little apart. What rounding cannot explain is a fault: stale weights in the sampler, randomness in the forward pass,
    another temperature. Then the update takes the samples for those of a policy that did not draw them.
    """

    tolerance: float
    has_spoken: bool = False

    def measure(self, batch: TrainBatch, warn: Callable[[str], None]) -> dict[str, float]:
        """Metrics of a batch with `old_log_probs`, the alarm among them; for `warn` see `check`."""
        metrics = sampler_metrics(batch)
        return metrics | self.check(metrics, warn)

    def check(self, metrics: Mapping[str, float], warn: Callable[[str], None]) -> dict[str, float]:
        """Compare a step's mismatch with the tolerance.

        Args:
            metrics: of the step; without the mismatch (a step without a valid token) there is nothing to compare.
            warn: shows a message to the user.

        Returns:
            The alarm as a metric, 1 or 0.
        """
        if MISMATCH not in metrics:
            return {}
        found = metrics[MISMATCH]
        rings = not found <= self.tolerance  # NaN rings, too
        if rings and not self.has_spoken:
            self.has_spoken = True
            warn(
                f"sampler and trainer disagree: {MISMATCH} is {found:.2g} nats per token; rounding explains at most "
                f"{self.tolerance:g}. The samples are not those of the policy that is updated. Check that the sampler "
                "has the current weights, that the forward pass draws no random numbers (dropout, noise in a router), "
                "and whether float32 in actor_rollout_ref.rollout.dtype and "
                "actor_rollout_ref.actor.fsdp_config.dtype cures it. Said once; watch " + ALARM
            )
        return {ALARM: float(rings)}

    def state_dict(self) -> StateDict:
        """Whether it has spoken."""
        return {"has_spoken": self.has_spoken}

    def load_state_dict(self, state: StateDict) -> None:
        """Take over what `state_dict` gave; an alarm that is new has not spoken."""
        self.has_spoken = state.get("has_spoken", False)
