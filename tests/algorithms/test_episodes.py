"""GAE over many episodes in a row: by hand, against `gae` of each episode, and where the answer is known."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.algorithms import ADVANTAGE_ESTIMATORS, discounted_sums, episodic_gae
from tether.algorithms.advantages.episodes import linear_recurrence


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def flags(*numbers):
    return torch.tensor(numbers, dtype=torch.bool)


def test_by_hand():
    # Two episodes: the first terminates at t=1, the second is cut by the rollout after t=3.
    result = episodic_gae(
        rows([1, 2, 3, 4]), rows([1, 1, 2, 2]), rows([1, 0, 2, 6]), flags([0, 1, 0, 0]), flags([1, 1, 1, 1]),
        gamma=0.5, lam=0.5,
    )  # fmt: skip
    # d = 1 + .5 - 1 = .5;  2 - 1 = 1;  3 + 1 - 2 = 2;  4 + 3 - 2 = 5
    torch.testing.assert_close(result.advantages, rows([0.5 + 0.25, 1, 2 + 0.25 * 5, 5]))
    torch.testing.assert_close(result.returns, rows([1.75, 2, 5.25, 7]))


@st.composite
def rollouts(draw):
    """(seed, N, T): random rewards and values, ends anywhere, and an invalid step after some ends."""
    return draw(st.integers(0, 2**20)), draw(st.integers(1, 3)), draw(st.integers(1, 17))


@given(rollouts(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.7, 1.0]))
@settings(max_examples=60, deadline=None)
def test_each_episode_is_gae_of_its_own(shape, gamma, lam):
    seed, count, steps = shape
    generator = torch.Generator().manual_seed(seed)
    rewards, values, after = torch.randn(3, count, steps, dtype=torch.float64, generator=generator)
    ends = torch.rand(count, steps, generator=generator) < 0.3
    valid = torch.ones_like(ends)
    valid[:, 1:] = ~(ends[:, :-1] & (torch.rand(count, steps - 1, generator=generator) < 0.5))
    ends &= valid
    # Inside an episode the next value is the value of the next state.
    inside = ~ends
    inside[:, -1] = False
    after = torch.where(inside, values.roll(-1, 1), after)
    poisoned = torch.where(valid, rewards, torch.nan)
    result = episodic_gae(poisoned, values, after, ends, valid, gamma=gamma, lam=lam)
    for n in range(count):
        start = 0
        for t in range(steps):
            if not valid[n, t]:
                assert result.advantages[n, t] == 0
                start = t + 1
            elif ends[n, t] or t == steps - 1:
                piece = slice(start, t + 1)
                expected = ADVANTAGE_ESTIMATORS["gae"](
                    rewards[n : n + 1, piece], torch.ones(1, t + 1 - start), values=values[n : n + 1, piece],
                    gamma=gamma, lam=lam, bootstrap_values=after[n : n + 1, t], normalize_advantages=False,
                )  # fmt: skip
                torch.testing.assert_close(result.advantages[n, piece], expected.advantages[0])
                torch.testing.assert_close(result.returns[n, piece], expected.returns[0])
                start = t + 1


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_constant_values_of_a_constant_reward(gamma, lam):
    # With r = 1 and V = c everywhere, d = 1 + gamma c - c in all steps but the terminal one, where d = 1 - c, and
    # A_t is a geometric sum.
    steps, c = 7, 3.0
    result = episodic_gae(
        torch.ones(1, steps, dtype=torch.float64), torch.full((1, steps), c, dtype=torch.float64),
        rows([c] * (steps - 1) + [0]), flags([0] * (steps - 1) + [1]), flags([1] * steps), gamma=gamma, lam=lam,
    )  # fmt: skip
    k = gamma * lam
    for t in range(steps):
        left = steps - 1 - t
        expected = sum(k**i for i in range(left)) * (1 + gamma * c - c) + k**left * (1 - c)
        assert result.advantages[0, t].item() == pytest.approx(expected, abs=1e-12)


def test_a_right_critic_leaves_no_advantage():
    gamma, steps = 0.9, 50
    values = rows(*[(1 - gamma ** (steps - t)) / (1 - gamma) for t in range(steps)])[None]
    after = torch.cat([values[:, 1:], torch.zeros(1, 1, dtype=torch.float64)], dim=1)
    ends, ones = flags(*[0] * (steps - 1), 1)[None], torch.ones(1, steps)
    result = episodic_gae(ones, values, after, ends, ones, gamma=gamma, lam=0.95)
    torch.testing.assert_close(result.advantages, torch.zeros(1, steps, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 33])
def test_recurrence_is_the_loop(steps):
    generator = torch.Generator().manual_seed(steps)
    x, carry = torch.rand(2, 2, steps, dtype=torch.float64, generator=generator)
    expected, y = torch.zeros(2, steps, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(steps)):
        y = x[:, t] + carry[:, t] * y
        expected[:, t] = y
    torch.testing.assert_close(linear_recurrence(x, carry), expected)


def test_discounted_sums_by_hand():
    sums = discounted_sums(rows([1, 2, 3, 4]), flags([0, 0, 1, 0]), torch.tensor([8.0], dtype=torch.float64), 0.5)
    torch.testing.assert_close(sums, rows([5, 4.5, 3, 5.5]))
