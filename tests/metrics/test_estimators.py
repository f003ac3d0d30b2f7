"""The metrics of an estimator, with numbers worked by hand."""

import math

import pytest
import torch

from tether.batch import RolloutBatch, TrainBatch
from tether.metrics.data import estimator_metrics
from tether.metrics.keys import describe


def make_batch() -> TrainBatch:
    """Five rows of two tokens: a group of two, a group of one with a score and one without, a group without any."""
    ids = torch.zeros(5, 2, dtype=torch.long)
    rollout = RolloutBatch(
        uid=torch.tensor([3, 3, 7, 7, 8]),
        prompt_ids=ids,
        prompt_length=torch.full((5,), 2),
        response_ids=ids,
        response_length=torch.full((5,), 2),
        response_mask=torch.ones(5, 2, dtype=torch.bool),
        rollout_log_probs=torch.zeros(5, 2),
        truncated=torch.tensor([True, False, True, True, False]),
        kept=None,
        batch_size=[5],
    )
    return TrainBatch.assemble(rollout, torch.tensor([1.0, 0.0, 3.0, math.nan, math.nan]))


def test_by_hand() -> None:
    batch = make_batch()
    batch.token_level_rewards = batch.token_level_scores
    batch.advantages = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 2.0], [9.0, 9.0], [9.0, 9.0]])
    batch.sum_pi_squared = torch.tensor([[0.5, 0.5], [0.5, 0.5], [1.0, 0.0], [9.0, 9.0], [9.0, 9.0]])
    batch.bootstrap_values = torch.tensor([2.0, 9.0, 4.0, 9.0, 9.0])
    batch.reward_baselines = torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0])
    metrics = estimator_metrics(batch)
    assert metrics == pytest.approx(
        {
            "critic/score/nonzero_fraction": 2 / 3,
            "critic/advantages/nonzero_fraction": 0.5,
            "group/single_fraction": 0.5,
            "actor/sum_pi_squared": 0.5,
            "critic/bootstrap_value_mean": 3.0,
            "baseline/beaten_fraction": 1 / 3,
        }
    )
    assert all(describe(key) for key in metrics)


def test_nothing_is_said_about_nothing() -> None:
    batch = make_batch()
    batch.leave_out(torch.ones(5, dtype=torch.bool))
    batch.advantages = torch.zeros(5, 2)
    assert estimator_metrics(batch) == {}
