"""Properties of every policy loss and the value loss: masked positions do not exist, and pieces add up."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithms.cases import CASES, Case, make_case
from tether.algorithms import (
    AGGREGATIONS,
    POLICY_LOSSES,
    TokenLoss,
    aggregate_loss,
    count_valid,
    kl_penalty,
    merge_metrics,
    value_loss,
)

LOSSES = [*POLICY_LOSSES, "value", "huber", "k3", "abs", "kl+"]
every_loss = pytest.mark.parametrize("name", LOSSES)
few = settings(max_examples=6, deadline=None)


def run(name: str, prediction: Tensor, case: Case) -> TokenLoss:
    """The loss `name` of log_probs, or of values; both are called the prediction."""
    if name in POLICY_LOSSES:
        arguments = (case.old_log_probs, case.advantages, case.mask)
        return POLICY_LOSSES[name](prediction, *arguments, **case.loss_inputs, clip_ratio_high=0.3)
    if name in ("value", "huber"):
        delta = 0.7 if name == "huber" else None
        return value_loss(prediction, case.values, case.rewards, case.mask, cliprange_value=0.2, huber_delta=delta)
    return TokenLoss(kl_penalty(prediction, case.ref_log_probs, name, case.mask), {})


def gradient(name: str, case: Case) -> tuple[TokenLoss, Tensor]:
    prediction = case.log_probs.clone().requires_grad_()
    result = run(name, prediction, case)
    result.loss.sum().backward()
    assert prediction.grad is not None
    return result, prediction.grad


@every_loss
@given(CASES, st.sampled_from([math.nan, math.inf, 1e9, -1e9]))
@few
def test_masked_poison_changes_no_bit(name: str, case: Case, poison: float) -> None:
    (clean, clean_gradient), (poisoned, poisoned_gradient) = gradient(name, case), gradient(name, case.poisoned(poison))
    assert torch.equal(clean.loss, poisoned.loss)
    assert torch.equal(clean_gradient, poisoned_gradient)
    assert not clean.loss[~case.mask].any()
    assert not clean_gradient[~case.mask].any()
    for key, metric in clean.metrics.items():
        assert float(metric) == float(poisoned.metrics[key])


@every_loss
@given(CASES, st.sampled_from(AGGREGATIONS), st.integers(1, 3))
@few
def test_micro_batches_give_the_gradient_of_the_whole(name: str, case: Case, mode: str, size: int) -> None:
    denominators = count_valid(case.mask)._asdict() | {"max_length": case.mask.shape[1]}
    rows = len(case.mask)

    def accumulate(pieces: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, float]]:
        prediction = case.log_probs.clone().requires_grad_()
        metrics = []
        for piece in pieces:
            result = run(name, prediction[piece], case.rows(piece))
            aggregate_loss(result.loss, case.mask[piece], mode, **denominators).backward()
            metrics.append(result.metrics)
        assert prediction.grad is not None
        return prediction.grad, {key: float(metric) for key, metric in merge_metrics(metrics).items()}

    whole, whole_metrics = accumulate((torch.arange(rows),))
    split, split_metrics = accumulate(torch.arange(rows).split(size))
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)
    assert split_metrics == pytest.approx(whole_metrics, rel=1e-12, abs=1e-12)


def test_a_mean_for_each_micro_batch_gives_another_gradient() -> None:
    """The negative control: dividing by the tokens of the micro-batch, as some trainers do, is not the same."""
    case = make_case(1)
    prediction = case.log_probs.clone().requires_grad_()
    counts = count_valid(case.mask)._asdict()
    aggregate_loss(run("vanilla", prediction, case).loss, case.mask, "token-mean", **counts).backward()
    whole = prediction.grad
    prediction.grad = None
    for piece in torch.arange(len(case.mask)).split(2):
        part, mask = case.rows(piece), case.mask[piece]
        share = aggregate_loss(
            run("vanilla", prediction[piece], part).loss, mask, "token-mean", **count_valid(mask)._asdict()
        )
        (share * len(piece) / len(case.mask)).backward()
    assert (prediction.grad - whole).abs().max() > 1e-3  # type: ignore[operator]
