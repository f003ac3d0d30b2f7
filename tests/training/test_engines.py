"""The engines of control policies agree: closed forms (flat) and autograd (local) give the same gradient."""

import pytest
import torch

from tests.training.flat_learner import OPTIONS, flat_learner
from tests.training.test_control import CHUNKED, LEVELS, SPECS, chunked_samples, make_policy, make_samples
from tether.training.control.forward import DecisionForward
from tether.training.control.losses import ControlLoss
from tether.training.engines.local import LocalEngine
from tether.training.protocol import LossSpec
from tether.training.text.micro_batches import MicroBatching, RowSize


def sizes(samples):
    """Every decision costs the same, and none shares anything."""
    return [RowSize(row, 0, 1) for row in range(len(samples))]


def gradients(policy):
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


def by_hand(policy, samples, loss):
    flat_learner(policy, loss).engine.gradients(samples, loss)
    return gradients(policy)


def by_autograd(policy, samples, loss, rows=32):
    engine = LocalEngine(policy, MicroBatching(max_rows=rows), OPTIONS, row_sizes=sizes)
    engine.accumulate_gradients(samples, LossSpec(DecisionForward(), loss))
    return gradients(policy)


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        torch.testing.assert_close(gradient, right[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("rows", [32, 5])
@pytest.mark.parametrize("kind", SPECS)
def test_single_actions(kind, rows):
    loss = ControlLoss("vanilla", {"clip_ratio_c": 2.0}, entropy_coeff=0.05, value_coeff=0.5, cliprange_value=0.4)
    samples = make_samples(make_policy(SPECS[kind]))
    expected = by_hand(make_policy(SPECS[kind]), samples, loss)
    assert_same(expected, by_autograd(make_policy(SPECS[kind]), samples, loss, rows))


@pytest.mark.parametrize("rows", [32, 5])
@pytest.mark.parametrize("aggregation", ["token-mean", "masked_mean_ratio"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", CHUNKED)
def test_chunks(kind, level, aggregation, rows):
    loss = ControlLoss(
        "vanilla", {"clip_ratio_c": 2.0}, aggregation=aggregation, entropy_coeff=0.05, value_coeff=0.5,
        cliprange_value=0.4, logprob_level=level, entropy_level=level,
    )  # fmt: skip
    samples = chunked_samples(make_policy(CHUNKED[kind]), level)
    expected = by_hand(make_policy(CHUNKED[kind]), samples, loss)
    assert_same(expected, by_autograd(make_policy(CHUNKED[kind]), samples, loss, rows))


def test_a_mean_of_each_micro_batch_would_show(monkeypatch):
    """The negative control: denominators that are counted after the cut."""
    loss, samples = ControlLoss(), chunked_samples(make_policy(CHUNKED["gaussian"]), "action_level")
    expected = by_hand(make_policy(CHUNKED["gaussian"]), samples, loss)
    monkeypatch.setattr(ControlLoss, "_elements", staticmethod(lambda level, sizes, width, chunk: 7))
    found = by_autograd(make_policy(CHUNKED["gaussian"]), samples, loss, rows=5)
    assert any(not torch.allclose(found[name], gradient) for name, gradient in expected.items())
