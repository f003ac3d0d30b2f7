"""Between the sampler and the update: what is too far from the policy is rejected, the rest gets importance weights.

Only where the old log-probabilities are recomputed. In bypass mode the policy loss does the same to itself
(`tether.algorithms.POLICY_LOSSES["bypass_mode"]`), since no other log-probabilities are known before the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tether.algorithms import (
    importance_metrics,
    importance_weights,
    masked_mean,
    masked_sum,
    rejection_mask,
    rejection_metrics,
    veto_mask,
)
from tether.batch import TrainBatch, filled, last_valid


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

        Nothing that comes later in the step sees a rejected token: not the advantages (GAE skips it), not the group
        statistics (a row without a token left is in none), not the denominators of the losses. What the reward gave at
        a rejected token moves to the last token of the row that is left. Weights are those of all that was sampled,
        rejected or not, and their mean too.
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
        batch.token_level_scores = _moved(batch.token_level_scores, sampled & ~kept, kept)
        batch.response_mask = kept
        return metrics


def _moved(scores: Tensor, rejected: Tensor, kept: Tensor) -> Tensor:
    """[B, T] scores, with what stands under `rejected` added at the last kept token of its row."""
    lost = masked_sum(scores, rejected, dim=-1)
    return torch.where(kept, scores, 0.0) + torch.where(last_valid(kept), lost[:, None], 0.0)
