"""Rejection of samples that are too far from the policy, and importance weights for the others.

This requires recomputed old log-probs. In bypass mode the policy loss applies the same correction
(`tether.algorithms.POLICY_LOSSES["bypass_mode"]`), since only the sampler's log-probs are available before the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tether.algorithms import (
    importance_metrics,
    importance_weights,
    masked_mean,
    masked_sum,
    rejection_mask,
    rejection_metrics,
    veto_mask,
)
from tether.batch import TrainBatch, filled, on_last_token


@dataclass(frozen=True)
class RolloutCorrection:
    """Corrects for the sampler with the formulas of `tether.algorithms.rollout_correction`."""

    importance: str | None = None
    """The level of the weights, ``token`` or ``sequence``; None computes no weights."""
    threshold: float = 2.0
    """The upper bound of a weight."""
    batch_normalize: bool = False
    """Whether to divide the weights by their mean over the batch."""
    rejection: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Bounds by mode, as returned by `parse_rejection`."""
    veto_threshold: float | None = None

    def apply(self, batch: TrainBatch) -> dict[str, float]:
        """Set `rollout_is_weights`, remove rejected tokens from `response_mask` and return metrics.

        The score of a row moves to its last accepted token. A row without an accepted token is ignored like one without
        a score.
        """
        # Later stages of the step ignore rejected tokens: advantages (GAE skips them) and the denominators of the
        # losses. Weights and their mean are those of all sampled tokens, rejected or not.
        old, sampler, sampled = filled(batch.old_log_probs), batch.rollout_log_probs, batch.response_mask
        if not sampled.any():
            return {}
        metrics: dict[str, float] = {}
        if self.importance is not None:
            batch.rollout_is_weights = importance_weights(
                old, sampler, sampled, level=self.importance, threshold=self.threshold,
                batch_normalize=self.batch_normalize,
            )  # fmt: skip
            metrics |= importance_metrics(old, sampler, sampled, level=self.importance, threshold=self.threshold)
        accepted = sampled
        if self.rejection:
            accepted = rejection_mask(old, sampler, sampled, self.rejection)
            metrics |= rejection_metrics(old, sampler, sampled, self.rejection)
        if self.veto_threshold is not None:
            not_vetoed = veto_mask(old, sampler, sampled, self.veto_threshold)
            accepted = accepted & not_vetoed
            vetoed = ~not_vetoed.any(dim=-1)
            metrics["rollout_corr/rollout_token_veto_fraction"] = float(
                masked_mean(vetoed.float(), sampled.any(dim=-1))
            )
        scores = masked_sum(batch.token_level_scores, sampled, dim=-1)
        batch.token_level_scores = on_last_token(scores, accepted).to(batch.token_level_scores.dtype)
        batch.response_mask = accepted
        batch.leave_out(~accepted.any(dim=-1))
        return metrics
