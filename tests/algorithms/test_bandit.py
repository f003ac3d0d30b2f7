"""Expected gradients of a softmax bandit, by enumerating its actions, against the analytic ones.

One state, four actions with logits theta, policy p = softmax(theta). The gradient of log p_a by theta is e_a - p, so
every policy loss has the expected gradient sum_a mu_a c_a (e_a - p), where mu is the sampler and c_a the derivative of
the loss of action a by log p_a, which the table states.
"""

import pytest
import torch
from torch import Tensor

from tether.algorithms import KL_ESTIMATORS, POLICY_LOSSES, full_kl, kl_penalty

THETA = torch.tensor([0.3, -0.2, 1.0, 0.1], dtype=torch.float64)
MU = torch.tensor([0.05, 0.3, 0.4, 0.25], dtype=torch.float64)  # ratios about 4.1, .41, 1.02, .66
A = torch.tensor([1.0, 2.0, -0.5, -3.0], dtype=torch.float64)
ROLLOUT = torch.tensor([0.2, 0.2, 0.3, 0.3], dtype=torch.float64)
SELECTED = torch.tensor([False, True, False, True])
P = THETA.softmax(dim=0)
R = P / MU


def slope(r: Tensor) -> Tensor:
    """Derivative of the gate of SAPO by log r: 4 s (1 - s) r."""
    tau = torch.tensor([1.0, 1.0, 1.05, 1.05], dtype=torch.float64)  # by the sign of A
    s = torch.sigmoid(tau * (r - 1))
    return 4 * s * (1 - s) * r


# Where PPO's clip cuts the gradient: a good action over 1.2, a bad one under 0.8 (no bad one is over c = 3).
OPEN = ~(((A > 0) & (R > 1.2)) | ((A < 0) & (R < 0.8)))
DERIVATIVES = {
    "vanilla": -A * R * OPEN,
    "gspo": -A * R * OPEN,  # one token a row: the same
    "bypass_mode": -A * R * OPEN,
    "decoupled": -A * R * OPEN * MU / ROLLOUT,
    "cispo": -A * R.clamp(0.8, 1.2),
    "dppo_tv": -A * R.clamp(max=3),  # no probability moved by more than 0.18
    "dppo_kl": -A * R.clamp(max=3),
    "dro": -A + R.log(),
    "topr": -A * torch.where(A < 0, R.clamp(max=1), 1.0),
    "gpg": -A,
    "sapo": -A * slope(R),
    "clip_cov": -A * R * OPEN * ~SELECTED,
    "m2po": -A * R * ~SELECTED,
    "kl_cov": -A * R + 0.1 * R.log().sign() * SELECTED,
    # log ratio clipped to +-.2, one-sidedly as above
    "geo_mean": -A * R * ~(((A > 0) & (R.log() > 0.2)) | ((A < 0) & (R.log() < -0.2))),
}


def expected_gradient(losses_of: object, weights: Tensor) -> Tensor:
    """Gradient by theta of sum_a weights_a loss_a, each action a row of one token."""
    theta = THETA.clone().requires_grad_()
    losses = losses_of(theta.log_softmax(dim=0)[:, None])  # type: ignore[operator]
    (weights * losses[:, 0]).sum().backward()
    assert theta.grad is not None
    return theta.grad


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_loss(name: str) -> None:
    def losses(log_probs: Tensor) -> Tensor:
        column = [MU.log()[:, None], A[:, None], torch.ones(4, 1)]
        extra = {"selected": SELECTED[:, None], "rollout_log_probs": ROLLOUT.log()[:, None]}
        return POLICY_LOSSES[name](log_probs, *column, **extra).loss

    analytic = (MU * DERIVATIVES[name]) @ (torch.eye(4, dtype=torch.float64) - P)
    torch.testing.assert_close(expected_gradient(losses, MU), analytic, rtol=1e-12, atol=1e-12)


def test_dual_clip_stops_a_bad_action_that_exploded() -> None:
    old = (P / 4)[:, None].log()  # ratio 4 everywhere
    bad = -torch.ones(4, 1, dtype=torch.float64)

    def losses(log_probs: Tensor, c: float) -> Tensor:
        return POLICY_LOSSES["vanilla"](log_probs, old, bad, torch.ones(4, 1), clip_ratio_c=c).loss

    assert not expected_gradient(lambda log_probs: losses(log_probs, 3.0), MU).any()
    assert expected_gradient(lambda log_probs: losses(log_probs, 5.0), MU).any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_one_step_raises_the_expected_advantage(name: str) -> None:
    """From p = mu, with nothing selected: every loss then is the policy gradient."""

    def losses(log_probs: Tensor) -> Tensor:
        column = [P.log()[:, None], A[:, None], torch.ones(4, 1)]
        return POLICY_LOSSES[name](
            log_probs, *column, selected=torch.zeros(4, 1), rollout_log_probs=P.log()[:, None]
        ).loss

    step = expected_gradient(losses, P)
    torch.testing.assert_close(step, (-P * A) @ (torch.eye(4, dtype=torch.float64) - P), rtol=1e-12, atol=1e-12)
    assert (THETA - 0.01 * step).softmax(dim=0) @ A > P @ A


REFERENCE = MU


def gradient_of(divergence: object) -> Tensor:
    theta = THETA.clone().requires_grad_()
    divergence(theta.log_softmax(dim=0)).backward()  # type: ignore[operator]
    assert theta.grad is not None
    return theta.grad


def reverse_kl(log_p: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - REFERENCE.log())).sum()


def forward_kl(log_p: Tensor) -> Tensor:
    return (REFERENCE * (REFERENCE.log() - log_p)).sum()


def twice_total_variation(log_p: Tensor) -> Tensor:
    return (log_p.exp() - REFERENCE).abs().sum()


KINDS = [kind for kind in KL_ESTIMATORS if kind != "full"]
TARGETS = {"abs": twice_total_variation, "k3": forward_kl, "low_var_kl": forward_kl}


@pytest.mark.parametrize("kind", KINDS)
def test_kl_gradient_in_expectation(kind: str) -> None:
    got = expected_gradient(lambda log_p: kl_penalty(log_p, REFERENCE.log()[:, None], kind), P)
    analytic = (
        torch.zeros(4, dtype=torch.float64) if kind in ("k1", "kl") else gradient_of(TARGETS.get(kind, reverse_kl))
    )
    torch.testing.assert_close(got, analytic, rtol=1e-12, atol=1e-12)


def test_full_kl_gradient() -> None:
    theta = THETA.clone().requires_grad_()
    full = full_kl(theta[None], REFERENCE.log()[None], 1)
    full.sum().backward()
    torch.testing.assert_close(full[0], reverse_kl(P.log()), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(theta.grad, gradient_of(reverse_kl), rtol=1e-12, atol=1e-12)


def test_every_loss_and_kind_has_its_number() -> None:
    assert set(DERIVATIVES) == set(POLICY_LOSSES)
    assert {*KINDS, "full"} == set(KL_ESTIMATORS)


def lowers_the_kl(step: Tensor) -> bool:
    return bool(reverse_kl((THETA - 0.01 * step).log_softmax(dim=0)) < reverse_kl(P.log()))


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_one_step_lowers_the_kl(kind: str) -> None:
    """As a term of the loss; but k1, whose step is no step."""
    if kind == "full":
        assert lowers_the_kl(gradient_of(lambda log_p: full_kl(log_p[None], REFERENCE.log()[None], 1).sum()))
        return
    step = expected_gradient(lambda log_p: kl_penalty(log_p, REFERENCE.log()[:, None], kind), P)
    if kind in ("k1", "kl"):
        assert step.abs().max() < 1e-15
    else:
        assert lowers_the_kl(step)


def policy_gradient(rewards: Tensor) -> Tensor:
    """Of the expected reward, negated: what gradient descent on the policy loss follows."""
    return (-P * rewards) @ (torch.eye(4, dtype=torch.float64) - P)


def test_a_kl_of_samples_in_the_reward_lowers_the_kl_and_one_of_the_whole_distribution_does_nothing() -> None:
    """k1 in the reward has the exact gradient of the KL; the full KL is the same for all actions: a mere baseline."""
    k1 = kl_penalty(P.log()[:, None], REFERENCE.log()[:, None], "k1")[:, 0]
    torch.testing.assert_close(policy_gradient(-k1), gradient_of(reverse_kl), rtol=1e-12, atol=1e-12)
    assert lowers_the_kl(policy_gradient(-k1))
    full = full_kl(P.log()[None], REFERENCE.log()[None], 1).expand(4)
    assert policy_gradient(-full).abs().max() < 1e-15


def test_full_kl_of_the_same_weight_in_reward_and_loss_is_the_gradient_of_the_kl_of_a_response() -> None:
    """Of two tokens: the first is drawn by P, the second, after token a, by the row a of a table."""
    table = torch.stack([THETA.roll(shift) for shift in range(4)])
    ref_table = torch.stack([REFERENCE.log().roll(2 * shift) for shift in range(4)])
    first, second = THETA.clone().requires_grad_(), table.clone().requires_grad_()
    first_kl, second_kl = full_kl(first[None], REFERENCE.log()[None])[0], full_kl(second, ref_table)
    log_p = first.log_softmax(dim=0)
    (first_kl + (log_p.exp() * second_kl).sum()).backward()  # the KL of the response, and its exact gradient
    exact = first.grad, second.grad

    first.grad = second.grad = None
    first_kl, second_kl = full_kl(first[None], REFERENCE.log()[None])[0], full_kl(second, ref_table)
    log_p = first.log_softmax(dim=0)
    in_loss = first_kl + (P * second_kl).sum()  # in expectation over the first tokens that were sampled
    in_reward = (P * log_p * (first_kl + second_kl).detach()).sum()  # the return of the first token; of the last: 0
    (in_loss + in_reward).backward()
    torch.testing.assert_close((first.grad, second.grad), exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
def test_kl_value_in_expectation(kind: str) -> None:
    value = (P * kl_penalty(P.log()[:, None], REFERENCE.log()[:, None], kind)[:, 0]).sum()
    torch.testing.assert_close(value, reverse_kl(P.log()), rtol=1e-12, atol=1e-12)
