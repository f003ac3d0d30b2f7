"""Promise 4 from the batch on: a row whose reward failed or abstained is as if it had never been sampled."""

import pytest
import torch

from tests.text.learning.batches import (
    UNSCORED,
    gradients,
    make_batch,
    make_critic,
    make_engine,
    make_policy,
    make_rollout,
    same_bits,
    weights,
)
from tether.algorithms import ADVANTAGE_ESTIMATORS, AGGREGATIONS
from tether.batch import TrainBatch
from tether.loop.engine import LossSpec, UpdatePlan
from tether.metrics.data import data_metrics, group_metrics
from tether.text.learning.losses import Aggregation, CriticLoss, PolicyForward, PolicyLoss, ValueForward

NAN = float("nan")
SCORES = torch.tensor([1.0, 0.0, NAN, 0.5, 0.5, 0.25, NAN, NAN, 1.0])
SCORED = ~SCORES.isnan()


def advantages(batch: TrainBatch, estimator: str) -> torch.Tensor:
    """Advantages of an estimator; whatever else it reads is NaN where the row has no score."""
    generator = torch.Generator().manual_seed(0)
    per_token = torch.rand(3, 9, 9, generator=generator, dtype=torch.float64)[:, : len(batch)]
    values, probs, agreement = (torch.where(batch.response_mask, tokens, NAN) for tokens in per_token)
    per_row = torch.rand(9, 3, generator=generator, dtype=torch.float64)[: len(batch)]
    per_row = torch.where(batch.scored[:, None], per_row, NAN)
    inputs = {
        "uid": batch.uid,
        "values": values,
        "old_log_probs": -probs,
        "sum_pi_squared": agreement,
        "reward_baselines": per_row[:, 0],
        "bootstrap_values": per_row[:, 1],
        "reward_components": per_row[:, 1:],
    }
    scores = batch.token_level_scores.double()
    return ADVANTAGE_ESTIMATORS[estimator](scores, batch.response_mask, **inputs, gamma=0.9, lam=0.8).advantages


def test_a_row_without_a_score_is_marked_and_gives_no_number() -> None:
    batch = TrainBatch.assemble(make_rollout(), SCORES)
    assert batch.scored.equal(SCORED)
    assert not batch.response_mask[~SCORED].any()
    assert batch.response_mask[SCORED].equal(make_rollout().response_mask[SCORED])
    assert batch.token_level_scores.isfinite().all()
    assert batch.token_level_scores.sum(dim=-1)[SCORED].equal(SCORES[SCORED])
    assert not batch.token_level_scores[~SCORED].any()


def test_the_score_lands_on_the_last_token_that_the_policy_sampled() -> None:
    rollout = make_rollout()
    rollout.response_mask[1, 7:] = False  # row 1 ends with a tool's output
    batch = TrainBatch.assemble(rollout, SCORES + 2)
    where = batch.token_level_scores.nonzero().tolist()
    assert where == [[0, 3], [1, 6], [3, 5], [4, 1], [5, 7], [8, 6]]


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
def test_the_others_advantages_are_those_of_a_batch_without_the_row(estimator: str) -> None:
    """Rows are put in an order in which the failed ones come last, so that both batches see the same values."""
    order = torch.cat([SCORED.nonzero()[:, 0], (~SCORED).nonzero()[:, 0]])
    rollout = make_rollout()[order]
    scores, count = SCORES[order], int(SCORED.sum())
    found = advantages(TrainBatch.assemble(rollout, scores), estimator)
    expected = advantages(TrainBatch.assemble(rollout[:count], scores[:count]), estimator)
    torch.testing.assert_close(found[:count], expected, rtol=0, atol=1e-12)
    assert not found[count:].any()


def test_a_group_of_grpo_by_hand() -> None:
    """Group 0 scores 1 and 0 beside an error: mean 0.5, std 0.7071. Group 2 keeps one row, which keeps its score."""
    batch = TrainBatch.assemble(make_rollout(), SCORES)
    found = advantages(batch, "grpo")
    assert found[[0, 1], 0].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert found[8, 0].item() == pytest.approx(1.0, abs=1e-5)


def test_an_error_taken_for_a_zero_would_show() -> None:
    """The negative control: scored 0, the failed row moves the mean of its group, 1/3, and so the other advantages."""
    silent = TrainBatch.assemble(make_rollout(), SCORES.nan_to_num())
    found = advantages(silent, "grpo")
    assert found[[0, 1], 0].tolist() == pytest.approx([1.1547, -0.5774], abs=1e-4)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_row_is_in_no_denominator_of_a_loss(role: str, aggregation: str) -> None:
    """The gradient is that of the batch without the row."""
    policy, critic = make_policy(), make_critic()
    batch = make_batch(policy, critic)
    others = batch[torch.arange(len(batch)) != UNSCORED]
    if role == "actor":
        model, forward = policy, PolicyForward(with_entropy=True)
        loss = PolicyLoss(aggregation=Aggregation(aggregation), entropy_coeff=0.1, kl_coef=0.1)
    else:
        model, forward, loss = critic, ValueForward(), CriticLoss(aggregation=Aggregation(aggregation))
    engine = make_engine(model)
    engine.accumulate_gradients(others, LossSpec(forward, loss))
    expected = gradients(model)
    engine.accumulate_gradients(batch, LossSpec(forward, loss))
    for name, gradient in gradients(model).items():
        assert (gradient - expected[name]).norm() <= 1e-10 * expected[name].norm(), name


def test_the_row_is_counted_and_in_no_statistic() -> None:
    batch = TrainBatch.assemble(make_rollout(), SCORES)
    metrics = data_metrics(batch, max_prompt_length=7)
    assert metrics["reward/excluded_rows"] == 3
    assert metrics["critic/score/mean"] == pytest.approx((1 + 0 + 0.5 + 0.5 + 0.25 + 1) / 6)
    groups = group_metrics(SCORES, batch.uid, batch.scored)
    assert groups["group/zero_std_fraction"] == 0  # the group with a single score left is no group
    assert groups["group/score_std_mean"] == pytest.approx((0.5 + SCORES[3:6].std(correction=0).item()) / 2)


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
def test_without_any_score_nothing_is_learned(estimator: str) -> None:
    policy, critic = make_policy(), make_critic()
    batch = TrainBatch.assemble(make_rollout(), torch.full((9,), NAN))
    batch.advantages = advantages(batch, estimator)
    batch.old_log_probs = batch.rollout_log_probs
    assert not batch.advantages.any()
    before = weights(policy)
    make_engine(policy).update(batch, LossSpec(PolicyForward(), PolicyLoss()), UpdatePlan(mini_batch_rows=4), step=0)
    assert same_bits(weights(policy), before)
    batch.values, batch.returns = batch.rollout_log_probs, batch.advantages
    before = weights(critic)
    make_engine(critic).update(batch, LossSpec(ValueForward(), CriticLoss()), UpdatePlan(mini_batch_rows=4), step=0)
    assert same_bits(weights(critic), before)
