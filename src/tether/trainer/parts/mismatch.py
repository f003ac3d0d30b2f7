"""The warning about a sampler that disagrees with the trainer, which no error would show."""

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
    """Return the tolerance if sampler and trainer compute in these formats, which is that of the coarsest."""
    return max(TOLERANCE[dtype] for dtype in dtypes)


def sampler_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return metrics of the distance between recomputed and sampler's log-probs, over all scored samples."""
    old, sampler, mask = filled(batch.old_log_probs), batch.rollout_log_probs, batch.response_mask
    if not mask.any():
        return {}
    return off_policy_metrics(old, sampler, mask) | mismatch_metrics(sampler, old, mask)


@dataclass
class MismatchAlarm:
    """Compares sampler and trainer in every step, and warns once if they disagree about the same weights and tokens."""

    # Both compute the probability of a token, with different kernels and batch shapes, so that rounding makes them
    # differ a little. A larger difference is a bug: stale weights in the sampler, randomness in the forward pass, a
    # different temperature. The update would then treat the samples as those of a policy that did not draw them.

    tolerance: float
    has_spoken: bool = False

    def measure(self, batch: TrainBatch, warn: Callable[[str], None]) -> dict[str, float]:
        """Return metrics of a batch with `old_log_probs`, including the alarm; `warn` shows a message to the user."""
        metrics = sampler_metrics(batch)
        return metrics | self.check(metrics, warn)

    def check(self, metrics: Mapping[str, float], warn: Callable[[str], None]) -> dict[str, float]:
        """Compare a step's mismatch with the tolerance.

        Args:
            metrics: the metrics of the step; without a valid token they lack the mismatch, and nothing is compared.
            warn: shows a message to the user.

        Returns:
            The alarm as a metric, 1 or 0.
        """
        if MISMATCH not in metrics:
            return {}
        mismatch = metrics[MISMATCH]
        is_mismatched = not mismatch <= self.tolerance  # also for NaN
        if is_mismatched and not self.has_spoken:
            self.has_spoken = True
            warn(
                f"sampler and trainer disagree: {MISMATCH} is {mismatch:.2g} nats per token; rounding explains at most "
                f"{self.tolerance:g}. The samples are not those of the policy that is updated. Check that the sampler "
                "has the current weights, that the forward pass draws no random numbers (dropout, noise in a router), "
                "and whether float32 in actor_rollout_ref.rollout.dtype and "
                "actor_rollout_ref.actor.fsdp_config.dtype fixes it. This is shown once; watch " + ALARM
            )
        return {ALARM: float(is_mismatched)}

    def state_dict(self) -> StateDict:
        """Return whether the warning was shown."""
        return {"has_spoken": self.has_spoken}

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned; an alarm that is new has not warned."""
        self.has_spoken = state.get("has_spoken", False)
