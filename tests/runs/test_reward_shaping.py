"""Scores before advantages, by hand: rows without a score are in no statistic and get nothing."""

import math
from functools import partial

import pytest
import torch

from tether.algorithms import RunningRewardNormalizer, overlong_penalty
from tether.batch import RolloutBatch, TrainBatch
from tether.text.learning.advantages import RewardShaping

LENGTHS = (2, 4, 3, 4)
PENALTY = partial(overlong_penalty, max_length=4, buffer_length=2, penalty_factor=0.5)  # 3 tokens: 0.25, 4 tokens: 0.5


def make_batch(scores: list[float]) -> TrainBatch:
    length = torch.tensor(LENGTHS)
    ids = torch.zeros(4, 4, dtype=torch.long)
    rollout = RolloutBatch(
        uid=torch.tensor([0, 0, 1, 1]),
        prompt_ids=ids,
        prompt_length=torch.full((4,), 2),
        response_ids=ids,
        response_length=length,
        response_mask=torch.arange(4) < length[:, None],
        rollout_log_probs=torch.zeros(4, 4),
        truncated=length == 4,
        kept=None,
        batch_size=[4],
    )
    return TrainBatch.assemble(rollout, torch.tensor(scores))


def rewards(batch: TrainBatch) -> list[float]:
    """The reward on the last token of each row; all others must be 0."""
    assert batch.token_level_rewards is not None
    last = batch.token_level_rewards[torch.arange(4), batch.response_length - 1]
    assert batch.token_level_rewards.sum().isclose(last.sum())
    return last.tolist()


def test_length_penalty() -> None:
    batch = make_batch([1.0, 1.0, 1.0, math.nan])
    metrics = RewardShaping(PENALTY).apply(batch)
    assert rewards(batch) == [1.0, 0.5, 0.75, 0.0]
    assert batch.token_level_scores.sum() == 3  # what the reward gave stays
    assert metrics == pytest.approx({"reward/overlong_penalty_mean": -0.25, "reward/overlong_fraction": 2 / 3})


def test_the_scale_comes_first() -> None:
    batch = make_batch([1.0, -1.0, 1.0, math.nan])
    RewardShaping(PENALTY, scale=5.0).apply(batch)
    assert rewards(batch) == [5.0, -5.5, 4.75, 0.0]


def test_per_batch_after_the_penalty() -> None:
    batch = make_batch([1.0, 3.5, 3.25, math.nan])
    assert set(RewardShaping(PENALTY, per_batch=True).apply(batch)) == {
        "reward/overlong_penalty_mean",
        "reward/overlong_fraction",
    }
    # 1, 3, 3: mean 7/3, variance 4/3
    assert rewards(batch) == pytest.approx([-2 / math.sqrt(3), 1 / math.sqrt(3), 1 / math.sqrt(3), 0.0])


def test_running_goes_over_steps() -> None:
    shaping = RewardShaping(running=RunningRewardNormalizer())
    first, second = make_batch([1.0, math.nan, 4.0, math.nan]), make_batch([math.nan, 10.0, math.nan, math.nan])
    metrics = shaping.apply(first)
    assert metrics == pytest.approx({"reward/running_mean": 2.5, "reward/running_std": math.sqrt(4.5)})
    assert rewards(first) == pytest.approx([-1.5 / math.sqrt(4.5), 0, 1.5 / math.sqrt(4.5), 0])
    metrics = shaping.apply(second)  # 1, 4, 10: mean 5, variance 21
    assert metrics == pytest.approx({"reward/running_mean": 5, "reward/running_std": math.sqrt(21)})
    assert rewards(second) == pytest.approx([0, 5 / math.sqrt(21), 0, 0])
    resumed = RewardShaping(running=RunningRewardNormalizer())
    resumed.load_state_dict(shaping.state_dict())
    assert resumed.state_dict() == shaping.state_dict() != {}


def test_a_step_without_a_score() -> None:
    batch = make_batch([math.nan] * 4)
    shaping = RewardShaping(PENALTY, running=RunningRewardNormalizer())
    assert shaping.apply(batch) == {"reward/running_mean": 0, "reward/running_std": 0}
    assert rewards(batch) == [0, 0, 0, 0]


def test_nothing_to_save_without_running_statistics() -> None:
    assert RewardShaping(PENALTY).state_dict() == {}
    switched_on = RewardShaping(running=RunningRewardNormalizer())
    switched_on.load_state_dict({})
    assert switched_on.state_dict()["count"] == 0
