"""Between the sampler and the update: what is too far from the policy is rejected, the rest gets importance weights.

Only where the old log-probabilities are recomputed. In bypass mode the policy loss does the same to itself
(`tether.algorithms.POLICY_LOSSES["bypass_mode"]`), since no other log-probabilities are known before the update.
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
    """Weights and rejections against the sampler (formulas: `tether.algorithms.rollout_correction`)."""

    importance: str | None = None
    """``token`` or ``sequence``; None: no weights."""
    threshold: float = 2.0
    """Highest weight."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rejection: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Mode -> bounds, of `parse_rejection`."""
    veto_threshold: float | None = None

    def apply(self, batch: TrainBatch) -> dict[str, float]:
        """Set `rollout_is_weights` and take what is rejected out of `response_mask`; returns metrics.

        Nothing that comes later in the step sees a rejected token: not the advantages (GAE skips it), not the
        denominators of the losses. The score of a row moves to the last token that is left of it, and a row of which
        nothing is left is left out like one without a score. Weights are those of all that was sampled, rejected or
        not, and their mean too.
        """
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
        kept = sampled
        if self.rejection:
            kept = rejection_mask(old, sampler, sampled, self.rejection)
            metrics |= rejection_metrics(old, sampler, sampled, self.rejection)
        if self.veto_threshold is not None:
            admitted = veto_mask(old, sampler, sampled, self.veto_threshold)
            kept = kept & admitted
            vetoed = ~admitted.any(dim=-1)
            metrics["rollout_corr/rollout_token_veto_fraction"] = float(
                masked_mean(vetoed.float(), sampled.any(dim=-1))
            )
        scores = masked_sum(batch.token_level_scores, sampled, dim=-1)
        batch.token_level_scores = on_last_token(scores, kept).to(batch.token_level_scores.dtype)
        batch.response_mask = kept
        batch.leave_out(~kept.any(dim=-1))
        return metrics
