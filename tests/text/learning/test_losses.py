"""The losses of a micro-batch on numbers small enough to work out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.text.learning.test_packing import example
from tether.batch import TrainBatch, filled
from tether.loop.engine import LossSizes
from tether.text.learning.losses import (
    Aggregation,
    CriticLoss,
    Distillation,
    PolicyLoss,
    PolicyOutputs,
    TokenSelection,
    ValueOutputs,
)

SIZES = LossSizes(num_tokens=6, num_sequences=4)  # of a mini-batch of which `example` is half
MASK = [[True, False, True], [True, False, False]]


def tokens(*values: float) -> Tensor:
    """The three valid tokens of the example, with 9 where there are none."""
    first, second, third = values
    return torch.tensor([[first, 9.0, second], [third, 9.0, 9.0]], dtype=torch.float64)


def batch() -> TrainBatch:
    """Ratios will be 1.5, 1 and 0.5, with advantages 2, -1 and -3."""
    full = example()
    assert full.response_mask.tolist() == MASK
    full.old_log_probs = tokens(-1.0, -1.0, -1.0)
    full.ref_log_probs = tokens(-1.0, -2.0, -1.0 + math.log(0.5))
    full.advantages = tokens(2.0, -1.0, -3.0)
    full.values = tokens(0.0, 1.0, 2.0)
    full.returns = tokens(1.0, 1.0, 0.0)
    return full


OUTPUTS = PolicyOutputs(
    log_probs=tokens(-1.0 + math.log(1.5), -1.0, -1.0 + math.log(0.5)), entropy=tokens(0.1, 0.2, 0.6), batch_size=[2]
)
POLICY = (-2.4, 1.0, 2.4)  # -2 * clipped 1.2; 1 * 1; 3 * clipped 0.8


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (Aggregation(), (-2.4 + 1 + 2.4) / 6),
        (Aggregation("seq-mean-token-sum"), (-2.4 + 1 + 2.4) / 4),
        (Aggregation("seq-mean-token-mean"), ((-2.4 + 1) / 2 + 2.4) / 4),
        (Aggregation("seq-mean-token-sum-norm"), (-2.4 + 1 + 2.4) / 3 / 4),  # by the width of the responses
        (Aggregation("seq-mean-token-sum-norm", scale_factor=10), (-2.4 + 1 + 2.4) / 10 / 4),
        (Aggregation("token-sum-norm"), (-2.4 + 1 + 2.4) / 3),
        (Aggregation("token-sum-norm", scale_factor=10), (-2.4 + 1 + 2.4) / 10),
        # an episode of full length 3 in a width of 3: every row weighs the same
        (Aggregation("masked_mean_ratio"), ((-2.4 + 1) / 2 + 2.4) / 4),
        (Aggregation("masked_mean_ratio", scale_factor=6), ((-2.4 + 1) * 6 / 2 + 2.4 * 6 / 1) / (4 * 3)),
    ],
)
def test_the_policy_loss(aggregation: Aggregation, expected: float) -> None:
    term = PolicyLoss(aggregation=aggregation)(OUTPUTS, batch(), SIZES)
    assert term.loss.item() == pytest.approx(expected)
    assert {name: share.item() for name, share in term.shares.items()} == pytest.approx({"actor/pg_loss": expected})
    metrics = {name: float(metric) for name, metric in term.metrics.items()}
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 3)
    assert (metrics["actor/ratio_max"], metrics["actor/ratio_min"]) == pytest.approx((1.5, 0.5))


def test_entropy_is_subtracted_and_kl_added() -> None:
    """k2 = d^2 / 2 with d = log 1.5, 1 and 0."""
    loss = PolicyLoss(entropy_coeff=0.1, kl_coef=0.2, kl_kind="k2")
    term = loss(OUTPUTS, batch(), SIZES)
    kl = (math.log(1.5) ** 2 + 1) / 2 / 6
    assert term.shares["actor/pg_loss"].item() == pytest.approx(sum(POLICY) / 6)
    assert term.shares["actor/kl_loss"].item() == pytest.approx(kl)
    assert term.loss.item() == pytest.approx(sum(POLICY) / 6 - 0.1 * 0.9 / 6 + 0.2 * kl)
    rows = replace(loss, aggregation=Aggregation("seq-mean-token-mean"), penalty_aggregation=Aggregation())
    expected = ((-2.4 + 1) / 2 + 2.4) / 4 - 0.1 * 0.9 / 6 + 0.2 * kl
    assert rows(OUTPUTS, batch(), SIZES).loss.item() == pytest.approx(expected)
    assert float(term.metrics["actor/kl_coef"]) == 0.2
    assert "actor/kl_coef" not in PolicyLoss()(OUTPUTS, batch(), SIZES).metrics


def test_the_kl_over_the_vocabulary_is_the_models() -> None:
    outputs = OUTPUTS.clone()
    outputs.full_kl = tokens(0.5, 0.25, 0.75)
    outputs.full_kl[~batch().response_mask] = 0.0
    term = PolicyLoss(kl_coef=0.2, kl_kind="full")(outputs, batch(), SIZES)
    assert term.shares["actor/kl_loss"].item() == pytest.approx(1.5 / 6)
    assert term.loss.item() == pytest.approx(sum(POLICY) / 6 + 0.2 * 1.5 / 6)


def test_distillation_is_added_to_the_policy_loss_or_stands_alone() -> None:
    """k1 is d = log 1.5, 1 and 0; as an advantage, -d with ratios 1.5, 1 and 0.5: d x 1.5, 1 and 0."""
    d = (math.log(1.5), 1.0, 0.0)
    beside = PolicyLoss(distillation=Distillation("k2", coefficient=0.2))(OUTPUTS, batch(), SIZES)
    assert beside.shares["distillation/loss"].item() == pytest.approx(sum(x**2 for x in d) / 2 / 6)
    assert beside.loss.item() == pytest.approx(sum(POLICY) / 6 + 0.2 * sum(x**2 for x in d) / 2 / 6)
    by_gradient = Distillation("k1", None, use_policy_gradient=True, clip_ratio_high=0.6)
    alone = PolicyLoss(distillation=by_gradient)(OUTPUTS, batch(), SIZES)
    assert alone.loss.item() == pytest.approx((1.5 * d[0] + d[1]) / 6)
    assert float(alone.metrics["distillation/kl"]) == pytest.approx(sum(d) / 3)
    assert alone.shares["actor/pg_loss"].item() == pytest.approx(sum(POLICY) / 6)  # measured all the same


def test_each_teacher_has_the_kl_of_its_rows() -> None:
    """The first row, with d = log 1.5 and 1, is the second teacher's; the other one, with 0, the first's."""
    taught = batch()
    taught.teacher = torch.tensor([1, 0])
    names = ("first", "second", "third")
    by_gradient = Distillation("k1", None, use_policy_gradient=True, teachers=names)
    metrics = PolicyLoss(distillation=by_gradient)(OUTPUTS, taught, SIZES).metrics
    found = {name: float(metric) for name, metric in metrics.items() if name.startswith("distillation/kl/")}
    assert found == {
        "distillation/kl/first": 0.0,
        "distillation/kl/second": pytest.approx((math.log(1.5) + 1.0) / 2),
    }


def test_selected_tokens_reach_the_policy_loss() -> None:
    """clip_cov: the loss of a selected token is 0."""
    full = batch()
    full.selected = torch.tensor([[True, False, False], [False, False, False]])
    term = PolicyLoss("clip_cov")(OUTPUTS, full, SIZES)
    assert term.loss.item() == pytest.approx((0 + POLICY[1] + POLICY[2]) / 6)


def test_the_rollouts_log_probs_reach_the_policy_loss() -> None:
    """decoupled: the third token's behaviour weight is 2, the others' 1."""
    full = batch()
    full.rollout_log_probs = tokens(-1.0, -1.0, -1.0 - math.log(2))
    assert PolicyLoss("decoupled")(OUTPUTS, full, SIZES).loss.item() == pytest.approx((-2.4 + 1 + 2 * 2.4) / 6)
    dropped = PolicyLoss("decoupled", {"behave_weight_threshold": 1.5})(OUTPUTS, full, SIZES)
    assert dropped.loss.item() == pytest.approx((-2.4 + 1) / 6)


def test_a_selection_sees_the_whole_mini_batch() -> None:
    """Advantages 2, -1, -3 (mean -2/3) and log-probs log 1.5, 0, log .5 above -1 (mean log(.75) / 3)."""
    mini, generator = batch(), torch.Generator().manual_seed(0)
    mean = math.log(0.75) / 3
    covariances = (8 / 3 * (math.log(1.5) - mean), -1 / 3 * -mean, -7 / 3 * (math.log(0.5) - mean))
    assert covariances[2] > covariances[0] > covariances[1]
    TokenSelection("kl_cov", {"kl_cov_ratio": 0.7})(mini, OUTPUTS, generator)  # two of three tokens
    assert filled(mini.selected).tolist() == [[True, False, False], [True, False, False]]
    # the first token is over the clip, and the third is under it: neither may be drawn
    TokenSelection("clip_cov", {"clip_cov_lb": -1.0, "clip_cov_ratio": 1.0})(mini, OUTPUTS, generator)
    assert filled(mini.selected).tolist() == [[False, False, True], [False, False, False]]


def test_options_reach_the_policy_loss() -> None:
    wide = PolicyLoss(options={"clip_ratio_low": 0.6, "clip_ratio_high": 0.6})(OUTPUTS, batch(), SIZES)
    assert wide.loss.item() == pytest.approx((-2 * 1.5 + 1 + 3 * 0.5) / 6)
    with pytest.raises(TypeError, match="clip_ratio_hihg"):
        PolicyLoss(options={"clip_ratio_hihg": 0.3})(OUTPUTS, batch(), SIZES)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        # values 0.2, 1 and 0: clipped to 0.2, 1 and 1.5, so the errors are 0.8, 0 and 1.5
        (CriticLoss(0.5), (0.8**2 + 0 + 1.5**2) / 2 / 6),
        (CriticLoss(0.5, aggregation=Aggregation("seq-mean-token-mean")), (0.8**2 / 2 + 1.5**2) / 2 / 4),
        (CriticLoss(0.5, huber_delta=1.0), (0.8**2 / 2 + 1.5 - 0.5) / 6),
    ],
)
def test_the_critic_loss(loss: CriticLoss, expected: float) -> None:
    term = loss(ValueOutputs(values=tokens(0.2, 1.0, 0.0), batch_size=[2]), batch(), SIZES)
    assert term.loss.item() == pytest.approx(expected)
    assert float(term.metrics["critic/vf_clipfrac"]) == pytest.approx(1 / 3)
