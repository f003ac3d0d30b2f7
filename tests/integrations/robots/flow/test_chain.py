"""The chain of a flow: log-densities against NumPy's, marginals against those of the ODE, columns of a record."""

import math

import numpy as np
import pytest
import torch

from tether.integrations.robots.flow.chain import Record, log_density, step, times
from tether.integrations.robots.flow.spec import FlowSpec
from tether.observations import ObsPart

METHODS = ("flow_sde", "flow_cps", "flow_noise")
MEAN, STD = 1.5, 0.4
"""Of the actions of a flow whose velocity is known."""


def velocity(x, t):
    """E[x_1 - x_0 | x_t = x] for x_0 ~ N(MEAN, STD^2) and x_1 ~ N(0, 1), x_t = (1 - t) x_0 + t x_1 (a regression)."""
    variance = (1 - t) ** 2 * STD**2 + t**2
    slope = (t - (1 - t) * STD**2) / variance
    return -MEAN + slope * (x - (1 - t) * MEAN)


def sampled(method, steps, level=0.7, count=20_000):
    """The ends of chains of which every step is random."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    for number in range(steps):
        index = torch.full((count,), number)
        t, _ = times(index, steps, x.dtype)
        mean, std = step(x, velocity(x, t[:, None]), index, steps, method, level)
        x = mean + std * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return x


def test_the_steps_of_the_ode_are_eulers():
    x, v = torch.randn(2, 5, 3, dtype=torch.float64)
    index = torch.tensor([0, 1, 2, 3, 1])
    mean, std = step(x, v, index, 4, None)
    torch.testing.assert_close(mean, x - v / 4)
    assert not std.any()
    learned = torch.rand(5, 3, dtype=torch.float64)
    mean, std = step(x, v, index, 4, "flow_noise", learned_std=learned)
    torch.testing.assert_close(mean, x - v / 4)
    assert std is learned


def test_a_step_of_the_sde_by_hand():
    """N = 4 from t = 1/2: s = 1/4, sigma = 0.5 sqrt(1) = 0.5, x_0 = 1 - 0.5 * 2 = 0, x_1 = 1 + 0.5 * 2 = 2."""
    x, v = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 2.0, dtype=torch.float64)
    mean, std = step(x, v, torch.tensor([2]), 4, "flow_sde", 0.5)
    assert float(mean) == pytest.approx(0.75 * 0 + (0.25 - 0.25 * 0.25 / (2 * 0.5)) * 2)
    assert float(std) == pytest.approx(0.5 * math.sqrt(0.25))
    # At t = 1 the denominator 1 - t is that of the time after, 1 - 3/4: sigma = 0.5 sqrt(1 / (1/4)) = 1.
    _, std = step(x, v, torch.tensor([0]), 4, "flow_sde", 0.5)
    assert float(std) == pytest.approx(1.0 * math.sqrt(0.25))


def test_a_step_that_keeps_its_share_of_noise_by_hand():
    """t = 1/2, s = 1/4 and a = pi / 4: 0.75 * 0 + 0.25 cos(pi / 4) * 2, and 0.25 sin(pi / 4)."""
    x, v = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 2.0, dtype=torch.float64)
    mean, std = step(x, v, torch.tensor([2]), 4, "flow_cps", 0.5)
    assert float(mean) == pytest.approx(0.25 / math.sqrt(2) * 2)
    assert float(std) == pytest.approx(0.25 / math.sqrt(2))
    of_noise = (float(mean) - 0.75 * 0) / 2  # the coefficient of x_1
    assert of_noise**2 + float(std) ** 2 == pytest.approx(0.25**2)


def test_the_log_density_is_that_of_an_independent_computation():
    rng = np.random.default_rng(0)
    x, v, after = rng.normal(size=(3, 6, 2))
    number, steps, level = 1, 5, 0.6
    t, d = 1 - number / steps, 1 / steps
    sigma = level * np.sqrt(t / (1 - t))
    score = -(x + (1 - t) * v) / t
    drift = v - sigma**2 / 2 * score  # of dx = drift dt + sigma dw, backwards in time
    mean, variance = x - d * drift, sigma**2 * d
    expected = -((after - mean) ** 2) / (2 * variance) - 0.5 * np.log(2 * np.pi * variance)
    x, v, after = map(torch.from_numpy, (x, v, after))
    found = log_density(after, *step(x, v, torch.full((6,), number), steps, "flow_sde", level))
    torch.testing.assert_close(found, torch.from_numpy(expected))


@pytest.mark.parametrize("method", [None, "flow_sde"])
def test_the_random_flow_has_the_marginals_of_the_ode(method):
    """With many steps all of them end in the distribution of the actions."""
    ends = sampled(method, steps=200)
    assert float(ends.mean()) == pytest.approx(MEAN, abs=0.02)
    assert float(ends.std()) == pytest.approx(STD, rel=0.05)


def test_a_drift_without_the_score_would_not():
    """The negative control: noise that nothing makes up for."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20_000, 1, generator=generator, dtype=torch.float64)
    for number in range(200):
        index = torch.full((len(x),), number)
        t, _ = times(index, 200, x.dtype)
        mean, _ = step(x, velocity(x, t[:, None]), index, 200, None)
        _, std = step(x, x, index, 200, "flow_sde", 0.7)
        x = mean + std * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    assert float(x.std()) > 1.2 * STD


def spec(**changes):
    fields = {
        "layout": (ObsPart("state", "vector", (3,)),), "action_dim": 2, "action_scale": ((0.0, 1.0), (1.0, 2.0)),
        "state_scale": ((0.0,) * 3, (1.0,) * 3), "num_action_chunks": 2, "horizon": 3, "latent_dim": 4, "num_steps": 5,
    }  # fmt: skip
    return FlowSpec(**({"model_type": "pi0"} | fields | changes))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("joint", [False, True])
def test_columns_give_a_record_back(joint, method):
    shape = spec(joint_logprob=joint, noise_method=method)
    actions, after = torch.randn(2, 7, 2, 2)
    states = torch.randn(7, 5 if joint else 1, 3, 4)
    index = torch.randint(0, 4, (7,))
    record = Record(actions, None if joint else index, states, None if joint else after)
    columns = record.columns(shape)
    assert columns.shape == (7, 2 * shape.action_width)
    assert torch.equal(columns.unflatten(1, (2, -1))[:, :, :2], actions)
    back = Record.of_columns(columns, shape)
    for name, value in vars(record).items():
        found = getattr(back, name)
        assert found is value is None or torch.equal(found, value)
    steps = back.steps(shape)
    if not joint:
        ((number, before, then),) = steps
        assert torch.equal(number, index)
        assert torch.equal(before, states[:, 0])
        assert torch.equal(then, after)
        return
    assert len(steps) == (4 if method == "flow_cps" else 5)
    assert torch.equal(steps[1][2], states[:, 2, :2, :2])
    assert method == "flow_cps" or torch.equal(steps[4][2], actions)
