"""Every engine of control policies gives the gradient of the first of them, for every policy and every loss."""

import pytest
import torch

from tests.conformance import flat_autograd
from tests.conformance.entries import CONTROL_ENGINES
from tests.control.learning import test_control_network as networks
from tests.control.learning.flat_learner import OPTIONS
from tests.control.learning.test_control import CHUNKED, LEVELS, SPECS, chunked_samples, make_policy, make_samples
from tests.integrations.robots.flow import test_policy as flows
from tests.integrations.robots.flow.fake import FakeBackbone
from tests.pairwise import in_turn_parameters, pairwise_parameters
from tether.algorithms import POLICY_LOSSES, TOKEN_SELECTIONS
from tether.control.learning.losses import ControlLoss
from tether.integrations.robots.flow import backbone

LOSSES = sorted(POLICY_LOSSES.keys() - {"bypass_mode"})
SELECTION = {
    "clip_cov": {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_cov_ratio": 0.2,
        "clip_cov_lb": -9.0,
        "clip_cov_ub": 9.0,
    },
    "kl_cov": {"kl_cov_ratio": 0.3},
    "m2po": {"m2_threshold": 0.001},
}
COEFFICIENTS = {"entropy_coeff": 0.05, "value_coeff": 0.5, "cliprange_value": 0.4}
OTHERS = [name for name in CONTROL_ENGINES if name != "flat"]


def gradients(engine, policy, samples, loss, micro_batch=None):
    policy.micro_batch = micro_batch
    made = CONTROL_ENGINES[engine](policy, OPTIONS, 1e-2)
    made._flat.grads.fill_(torch.nan)  # what is there does not count
    outputs = made.gradients(samples, loss, lambda: torch.Generator().manual_seed(3))
    norm = {} if outputs.policy_grad_norm is None else {"norm": outputs.policy_grad_norm}
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()} | norm


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        torch.testing.assert_close(gradient, right[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(("engine", "kind", "name"), in_turn_parameters(OTHERS, list(networks.SPECS), LOSSES))
def test_every_loss_of_networks_and_memories(engine, kind, name):
    loss = ControlLoss(name, selection=SELECTION.get(name, {}), **COEFFICIENTS)
    samples = networks.random_samples(networks.make(kind))
    expected = gradients("flat", networks.make(kind), samples, loss)
    assert_same(expected, gradients(engine, networks.make(kind), samples, loss, micro_batch=8))


@pytest.mark.parametrize(
    ("engine", "kind", "name"), in_turn_parameters(OTHERS, [flows.KINDS[0], flows.KINDS[-1]], LOSSES)
)
def test_every_loss_of_flows(engine, kind, name, monkeypatch):
    monkeypatch.setattr(backbone, "make_backbone", FakeBackbone)
    loss = ControlLoss(name, logprob_level="chunk_level", selection=SELECTION.get(name, {}), **COEFFICIENTS)
    samples = flows.samples(flows.make(*kind))
    expected = gradients("flat", flows.make(*kind), samples, loss)
    assert_same(expected, gradients(engine, flows.make(*kind), samples, loss, micro_batch=5))


@pytest.mark.parametrize(("engine", "kind", "name"), in_turn_parameters(OTHERS, list(SPECS), LOSSES))
def test_every_loss_of_single_actions(engine, kind, name):
    loss = ControlLoss(name, selection=SELECTION.get(name, {}), **COEFFICIENTS)
    samples = make_samples(make_policy(SPECS[kind]))
    expected = gradients("flat", make_policy(SPECS[kind]), samples, loss)
    assert_same(expected, gradients(engine, make_policy(SPECS[kind]), samples, loss, micro_batch=5))


@pytest.mark.parametrize(
    ("engine", "kind", "level", "aggregation", "critic_only"),
    pairwise_parameters(
        OTHERS, list(CHUNKED), list(LEVELS), ("token-mean", "seq-mean-token-mean", "masked_mean_ratio"), (False, True)
    ),
)
def test_chunks(engine, kind, level, aggregation, critic_only):
    loss = ControlLoss(
        aggregation=aggregation, logprob_level=level, entropy_level=level, critic_only=critic_only, **COEFFICIENTS
    )
    samples = chunked_samples(make_policy(CHUNKED[kind]), level)
    expected = gradients("flat", make_policy(CHUNKED[kind]), samples, loss)
    assert_same(expected, gradients(engine, make_policy(CHUNKED[kind]), samples, loss, micro_batch=5))


def test_every_selection_is_tested():
    assert SELECTION.keys() == TOKEN_SELECTIONS.keys()


def test_a_mean_of_each_micro_batch_would_show(monkeypatch):
    """The negative control: denominators that are counted after the cut."""
    loss, samples = ControlLoss(), chunked_samples(make_policy(CHUNKED["gaussian"]), "action_level")
    expected = gradients("flat", make_policy(CHUNKED["gaussian"]), samples, loss)
    weights_of = flat_autograd.weights_of

    def after_the_cut(loss, rows, width, chunk):
        cut = [weights_of(loss, rows[first : first + 5], width, chunk) for first in range(0, len(rows), 5)]
        return [torch.cat(weights) for weights in zip(*cut, strict=True)]

    monkeypatch.setattr(flat_autograd, "weights_of", after_the_cut)
    found = gradients("autograd", make_policy(CHUNKED["gaussian"]), samples, loss, micro_batch=5)
    assert any(not torch.allclose(found[name], gradient) for name, gradient in expected.items())
