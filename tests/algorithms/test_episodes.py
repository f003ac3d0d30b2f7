"""GAE over many episodes in a row: by hand, against a loop over time, and where the answer is known."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.algorithms import ADVANTAGE_ESTIMATORS, discounted_sums, episodic_gae
from tether.algorithms.advantages.gae import linear_recurrence


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


def by_loop(rewards, values, after, ends, valid, gamma, lam):
    """Advantages of one row, in floats, from the last step to the first."""
    advantages, advantage = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        if ends[t]:
            advantage = 0.0
        if valid[t]:
            advantage = rewards[t] + gamma * after[t] - values[t] + gamma * lam * advantage
            advantages[t] = advantage
    return advantages


@given(rollouts(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.7, 1.0]))
@settings(max_examples=60, deadline=None)
def test_it_is_the_loop_over_time(shape, gamma, lam):
    seed, count, steps = shape
    generator = torch.Generator().manual_seed(seed)
    rewards, values, after = torch.randn(3, count, steps, dtype=torch.float64, generator=generator)
    ends, skipped = torch.rand(2, count, steps, generator=generator) < 0.3
    poisoned = [torch.where(skipped, torch.nan, x) for x in (rewards, values, after)]
    result = episodic_gae(*poisoned, ends, ~skipped, gamma=gamma, lam=lam)
    for n in range(count):
        row = by_loop(*(x[n].tolist() for x in (rewards, values, after, ends, ~skipped)), gamma, lam)
        torch.testing.assert_close(result.advantages[n], torch.tensor(row, dtype=torch.float64))
    torch.testing.assert_close(result.returns, torch.where(skipped, 0.0, result.advantages + values))


@given(rollouts(), st.sampled_from([0.0, 0.9, 1.0]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_text_is_one_episode_a_row(shape, gamma, truncated):
    """The value after a token is that of the row's next policy token, whatever stands between."""
    seed, count, steps = shape
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, count, steps, dtype=torch.float64, generator=generator)
    mask = torch.rand(count, steps, generator=generator) < 0.6
    lam, bootstrap = torch.rand(2, count, dtype=torch.float64, generator=generator)
    result = ADVANTAGE_ESTIMATORS["gae"](
        torch.where(mask, rewards, torch.nan), mask, values=torch.where(mask, values, torch.nan), gamma=gamma, lam=lam,
        bootstrap_values=bootstrap if truncated else None, normalize_advantages=False,
    )  # fmt: skip
    for n in range(count):
        kept = mask[n].nonzero().flatten().tolist()
        r, v = rewards[n, kept].tolist(), values[n, kept].tolist()
        after = [*v[1:], bootstrap[n].item() if truncated else 0.0]
        row = by_loop(r, v, after, [False] * len(kept), [True] * len(kept), gamma, lam[n].item())
        torch.testing.assert_close(result.advantages[n, kept], torch.tensor(row, dtype=torch.float64))
        assert (result.advantages[n, ~mask[n]] == 0).all()


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
