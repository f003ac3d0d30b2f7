"""Metrics of an advantage estimator: the share of tokens that it teaches, and the inputs that it rests on.

Legend as in `tether.metrics.data`: statistics select first, reduce in float64, and have no key where there is nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tether.batch import TrainBatch, filled


def estimator_metrics(batch: TrainBatch) -> dict[str, float]:
    """Describe the advantages of a finished batch, and the fields that only some estimators need where they are set.

    Args:
        batch: with `advantages`.
    """
    mask, scored = batch.response_mask, batch.scored
    metrics = _mean("critic/score/nonzero_fraction", _row_sums(batch.token_level_scores, mask)[scored] != 0)
    if batch.advantages is not None:
        metrics |= _mean("critic/advantages/nonzero_fraction", batch.advantages[mask] != 0)
    _, sizes = batch.uid[scored].unique(return_counts=True)
    metrics |= _mean("group/single_fraction", sizes == 1)
    if batch.sum_pi_squared is not None:
        metrics |= _mean("actor/sum_pi_squared", batch.sum_pi_squared[mask])
    if batch.bootstrap_values is not None:
        metrics |= _mean("critic/bootstrap_value_mean", batch.bootstrap_values[scored & batch.truncated])
    if batch.reward_baselines is not None:
        beaten = _row_sums(filled(batch.token_level_rewards), mask) > batch.reward_baselines
        metrics |= _mean("baseline/beaten_fraction", beaten[scored])
    return metrics


def _row_sums(per_token: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, per_token, 0.0).double().sum(dim=-1)


def _mean(key: str, values: Tensor) -> dict[str, float]:
    return {key: values.double().mean().item()} if len(values) else {}
