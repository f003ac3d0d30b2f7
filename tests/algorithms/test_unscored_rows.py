"""From the rollout to the advantages: rows without a score are left out of every statistic, in every estimator."""

import math

import pytest
import torch

from tether.algorithms import ADVANTAGE_ESTIMATORS, Advantages
from tether.batch import RolloutBatch, TrainBatch

ROWS, WIDTH = 9, 4
SCORES = torch.tensor([1.0, math.nan, 3.0, 0.5, 0.5, math.nan, math.nan, 2.0, math.nan])
"""Groups of three: one with two different scores left, one with two equal ones, one with a single score."""
PER_TOKEN = ("values", "old_log_probs", "sum_pi_squared")


def make_batch(rows: torch.Tensor | slice = slice(None)) -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    length = torch.tensor([4, 1, 2, 3, 3, 4, 2, 1, 4])
    rollout = RolloutBatch(
        uid=torch.arange(3).repeat_interleave(3),
        prompt_ids=torch.zeros(ROWS, 1, dtype=torch.long),
        prompt_length=torch.ones(ROWS, dtype=torch.long),
        response_ids=torch.zeros(ROWS, WIDTH, dtype=torch.long),
        response_length=length,
        response_mask=torch.arange(WIDTH) < length[:, None],
        rollout_log_probs=torch.zeros(ROWS, WIDTH),
        truncated=length == WIDTH,
        kept=None,
        batch_size=[ROWS],
    )
    batch = TrainBatch.assemble(rollout, SCORES)
    numbers = torch.rand(3, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    batch.values, batch.old_log_probs, batch.sum_pi_squared = numbers[0], -numbers[1], numbers[2]
    batch.bootstrap_values = numbers[0, :, 0]
    batch.reward_baselines = numbers[1, :, 0]
    batch.reward_components = torch.stack([SCORES.double().nan_to_num(9.0), numbers[2, :, 0]], dim=1)
    return batch[rows]


def estimate(name: str, batch: TrainBatch) -> Advantages:
    return ADVANTAGE_ESTIMATORS[name](
        batch.token_level_scores.double(),
        batch.response_mask,
        uid=batch.uid,
        bootstrap_values=batch.bootstrap_values,
        reward_baselines=batch.reward_baselines,
        reward_components=batch.reward_components,
        gamma=0.9,
        lam=0.8,
        **{field: getattr(batch, field) for field in PER_TOKEN},
    )


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_a_row_without_a_score_might_as_well_not_be_there(name: str) -> None:
    whole = estimate(name, make_batch())
    kept = estimate(name, make_batch(~SCORES.isnan()))
    for field in ("advantages", "returns"):
        everywhere, there = getattr(whole, field), getattr(kept, field)
        torch.testing.assert_close(everywhere[~SCORES.isnan()], there, rtol=0, atol=1e-12)
        assert not everywhere[SCORES.isnan()].any()


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("grpo", 2.0), ("grpo_vectorized", 2.0), ("rloo", 2.0), ("opo", 2.0), ("gpg", 2.0), ("raw", 2.0),
        ("optimal_token_baseline", 2.0), ("tir_optimal_token_baseline", 2.0), ("grpo_passk", 0.0),
        ("rloo_vectorized", 0.0),
    ],
)  # fmt: skip
def test_the_only_score_of_a_group(name: str, alone: float) -> None:
    """It keeps its score, since there is nothing to compare it with; where verl gives it nothing, it gets nothing."""
    assert estimate(name, make_batch()).advantages[7, 0].item() == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg"])
def test_a_group_of_equal_scores_teaches_nothing(name: str) -> None:
    assert not estimate(name, make_batch()).advantages[3:5].any()


def test_leaving_rows_out_is_leaving_their_score_out() -> None:
    batch, without = make_batch(), make_batch()
    batch.leave_out(torch.arange(ROWS) == 2)
    assert batch.scored.tolist() == [True, False, False, True, True, False, False, True, False]
    assert not batch.response_mask[2].any()
    assert not batch.token_level_scores[2].any()
    assert torch.equal(batch.response_mask[3:], without.response_mask[3:])
    assert torch.equal(batch.token_level_scores[[0, 1]], without.token_level_scores[[0, 1]])
