"""`PreallocatedGradients` has the bits of `FlatEngine.gradients`, wherever it takes its place."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.control.learning.flat_learner import OPTIONS
from tether.control.learning import losses, preallocated
from tether.control.learning.flat import FlatEngine
from tether.control.learning.losses import ControlLoss, RolloutForward, Samples, loss_spec
from tether.control.learning.preallocated import PreallocatedGradients
from tether.control.policies.mlp_policy import make_policy
from tether.control.policies.spec import PolicySpec
from tether.loop.engine import UpdatePlan

NUMBERS = PolicySpec(obs_dim=7, choices=None, action_width=3, hidden_dim=16, num_layers=2)
CHOICE = replace(NUMBERS, choices=(5,), action_width=1)
LOSS = ControlLoss(
    options={"clip_ratio_low": 0.1, "clip_ratio_high": 0.2, "clip_ratio_c": 1.5}, entropy_coeff=0.01, value_coeff=0.7
)


class GeneralEngine(FlatEngine):
    """Never uses preallocated memory."""

    def _preallocated(self, mini, loss):
        return None


def rollout(spec, dtype=torch.float32, rows=70):
    policy = make_policy(spec, seed=0).to(dtype)
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(5, rows, 1, dtype=dtype, generator=generator)
    obs = torch.randn(rows, spec.obs_dim, dtype=dtype, generator=generator)
    if spec.choices:
        actions = torch.randint(spec.choices[0], (rows, 1), generator=generator)
    else:
        actions = torch.randn(rows, policy.head.width, dtype=dtype, generator=generator)
    with torch.no_grad():
        log_probs = policy.head.evaluate(policy.actor(obs), actions).log_probs.sum(-1, keepdim=True)
        values = policy.values(obs)
    far = torch.where(torch.arange(rows)[:, None] % 9 == 0, 30.0, 0.3).to(dtype)  # beyond the bound of log-ratios, too
    return Samples(obs, actions, log_probs + far * normal[0], normal[1], values + normal[2], values + normal[3])


def updated(engine_type, spec, loss, dtype=torch.float32, **plan):
    engine = engine_type(make_policy(spec, seed=0).to(dtype), OPTIONS, critic_lr=2e-2)
    plan = UpdatePlan(mini_batch_rows=32, epochs=3, shuffle=True, **plan)  # the last mini-batch has 6 rows
    metrics = [
        engine.update(rollout(spec, dtype), loss_spec(loss, RolloutForward()), plan, step).metrics for step in (1, 2)
    ]
    return engine.policy.state_dict(), metrics


@pytest.mark.parametrize(
    ("spec", "loss", "more"),
    [
        (NUMBERS, LOSS, {}),
        (NUMBERS, replace(LOSS, cliprange_value=0.2, huber_delta=0.5), {"target_kl": 1e-3}),
        (NUMBERS, replace(LOSS, aggregation="token-sum-norm", max_length=7.0, options={}), {}),
        (replace(NUMBERS, action_width=1, num_layers=1), LOSS, {}),
        (replace(NUMBERS, action_width=17, critic_hidden_dim=8, critic_num_layers=3), LOSS, {}),
        (CHOICE, LOSS, {}),
        (replace(CHOICE, choices=(2,)), replace(LOSS, entropy_coeff=0.0), {"dtype": torch.float64}),
        (NUMBERS, LOSS, {"dtype": torch.float64}),
    ],
)
def test_gradients_are_bitwise_equal_to_the_general_code(spec, loss, more):
    (weights, metrics), (expected, expected_metrics) = (
        updated(kind, spec, loss, **more) for kind in (FlatEngine, GeneralEngine)
    )
    assert metrics == expected_metrics
    for name, value in weights.items():
        assert torch.equal(value, expected[name]), name


def test_an_exp_that_rounds_differently_is_detected(monkeypatch):
    """The negative control: NumPy's exp instead of PyTorch's, equal to its last digits."""
    monkeypatch.setattr(losses, "exp", lambda x: np.exp(x) if isinstance(x, np.ndarray) else x.exp())
    weights, expected = (updated(kind, NUMBERS, LOSS)[0] for kind in (FlatEngine, GeneralEngine))
    assert not all(torch.equal(value, expected[name]) for name, value in weights.items())


def test_unsupported_policies_and_losses_use_the_general_code():
    def taken(spec=NUMBERS, loss=LOSS, **columns):
        policy = make_policy(spec, seed=0)
        FlatEngine(policy, OPTIONS, critic_lr=1e-2)
        rows = rollout(NUMBERS) if spec.choices is None else rollout(CHOICE)
        return PreallocatedGradients.of(policy, loss, replace(rows, **columns)) is not None

    assert taken()
    assert taken(CHOICE)
    two = torch.zeros(70, 2)
    others = {
        "relu": taken(replace(NUMBERS, activation="relu")),
        "shared layers": taken(replace(NUMBERS, share_critic=True)),
        "no critic": taken(replace(NUMBERS, value_width=0)),
        "chunks": taken(replace(NUMBERS, num_action_chunks=2)),
        "several choices": taken(replace(CHOICE, choices=(3, 4), action_width=2)),
        "choices and numbers": taken(replace(NUMBERS, choices=(3,))),
        "memory": taken(replace(NUMBERS, lstm_dim=4)),
        "another loss": taken(loss=replace(LOSS, name="cispo")),
        "critic alone": taken(loss=replace(LOSS, critic_only=True)),
        "episodes weigh equally": taken(loss=replace(LOSS, aggregation="masked_mean_ratio")),
        "a mask": taken(mask=torch.ones(70, 1, dtype=torch.bool)),
        "a number for each column": taken(old_log_probs=two),
        "a value for each action": taken(values=two, returns=two),
    }
    assert not any(others.values()), others


def test_large_mini_batches_use_the_general_code(monkeypatch):
    monkeypatch.setattr(preallocated, "MAX_ROWS", 31)
    weights, expected = (updated(kind, NUMBERS, LOSS)[0] for kind in (FlatEngine, GeneralEngine))
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
