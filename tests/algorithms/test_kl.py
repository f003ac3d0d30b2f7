import math

import pytest
import torch

from tether.algorithms import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    entropy_from_logits,
    full_kl,
    kl_penalty,
    sum_pi_squared,
)

# d = log p - log q = log 2, log(1/2), 0
LOG_P = torch.tensor([[0.5, 0.25, 0.3]], dtype=torch.float64).log()
LOG_Q = torch.tensor([[0.25, 0.5, 0.3]], dtype=torch.float64).log()
LN2 = math.log(2)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("k1", "kl"), [LN2, -LN2, 0]),
        (("abs",), [LN2, LN2, 0]),
        (("k2", "mse"), [LN2**2 / 2, LN2**2 / 2, 0]),
        (("k3", "low_var_kl"), [0.5 - 1 + LN2, 2 - 1 - LN2, 0]),  # exp(-d) - 1 + d
    ],
)
def test_values_by_hand(kinds: tuple[str, ...], expected: list[float]) -> None:
    for kind in kinds:
        assert kl_penalty(LOG_P, LOG_Q, kind)[0].tolist() == pytest.approx(expected)
        assert kl_penalty(LOG_P, LOG_Q, f"{kind}+")[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"])
def test_plus_takes_the_gradient_of_k2(kind: str) -> None:
    log_p = LOG_P.clone().requires_grad_()
    kl_penalty(log_p, LOG_Q, f"{kind}+").sum().backward()
    torch.testing.assert_close(log_p.grad, LOG_P - LOG_Q)


def test_k3_is_clamped() -> None:
    far = torch.tensor([[-50.0, 50.0]])
    assert kl_penalty(far, torch.zeros(1, 2), "k3").tolist() == [[10, 10]]


def test_registry_and_errors() -> None:
    base = {"k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"}
    assert set(KL_ESTIMATORS) == base | {f"{kind}+" for kind in base} | {"full"}
    with pytest.raises(ValueError, match="needs logits: call full_kl"):
        kl_penalty(LOG_P, LOG_Q, "full")
    with pytest.raises(ValueError, match=r"'k4'. Use one of: k1, kl, abs"):
        kl_penalty(LOG_P, LOG_Q, "k4")


def test_full_kl_and_entropy_by_hand() -> None:
    # p = (3/4, 1/4), q = (1/2, 1/2): KL = .75 log 1.5 + .25 log .5
    p = torch.tensor([0.75, 0.25], dtype=torch.float64)
    logits, ref = p.log().expand(2, 3, 2) + 5.0, torch.zeros(2, 3, 2, dtype=torch.float64)
    for chunk in (1, 4, 100):
        expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
        torch.testing.assert_close(full_kl(logits, ref, chunk), torch.full((2, 3), expected).double())
        entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
        torch.testing.assert_close(entropy_from_logits(logits, chunk), torch.full((2, 3), entropy).double())
        torch.testing.assert_close(sum_pi_squared(logits, chunk), torch.full((2, 3), 10 / 16).double())
    assert torch.equal(KL_ESTIMATORS["full"](logits, ref, 2), full_kl(logits, ref, 2))


def test_tokens_of_probability_0_take_no_part() -> None:
    # p = (3/4, 1/4, 0), q = (1/2, 1/2, 0) and (1/4, 1/4, 1/2): logits of -inf, and of both models. The gradients by the
    # other two logits are those without the third token, p (log p - log q - KL) and -p (log p + entropy).
    p = torch.tensor([0.75, 0.25, 0.0], dtype=torch.float64)
    for q in ([0.5, 0.5, 0.0], [0.25, 0.25, 0.5]):
        ref = torch.tensor(q, dtype=torch.float64)
        pair = p[:2], ref[:2]
        kl = (pair[0] * (pair[0] / pair[1]).log()).sum()
        entropy = -(pair[0] * pair[0].log()).sum()
        z = p.log()[None].requires_grad_()
        found = full_kl(z, ref.log()[None]), entropy_from_logits(z), sum_pi_squared(z)
        torch.testing.assert_close(torch.cat(found), torch.stack([kl, entropy, (p * p).sum()]))
        by_kl, by_entropy, by_square = (torch.autograd.grad(value.sum(), z)[0][0] for value in found)
        assert by_kl[2] == by_entropy[2] == by_square[2] == 0
        torch.testing.assert_close(by_kl[:2], pair[0] * ((pair[0] / pair[1]).log() - kl))
        torch.testing.assert_close(by_entropy[:2], -pair[0] * (pair[0].log() + entropy))
        assert by_square.isfinite().all()
    never_sampled_there = torch.tensor([[0.0, -math.inf]])
    assert full_kl(torch.zeros(1, 2), never_sampled_there).tolist() == [math.inf]


def test_chunks_have_the_gradient_of_the_whole() -> None:
    logits = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = []
    for chunk in (2, 7):
        x = logits.clone().requires_grad_()
        entropy_from_logits(x, chunk).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-14, atol=1e-14)


def test_half_precision_logits_are_widened() -> None:
    assert entropy_from_logits(torch.zeros(2, 8, dtype=torch.bfloat16)).dtype == torch.float32


def test_kl_in_reward() -> None:
    # k1, coefficient .1. Row 0: kl log 2, -log 2; row 1: one token, log 2; row 2: nothing valid.
    scores = torch.tensor([[0.0, 1.0], [2.0, math.nan], [math.nan, math.nan]])
    old = torch.tensor([[LN2, 0.0], [LN2, math.nan], [math.nan, math.nan]])
    ref = torch.tensor([[0.0, LN2], [0.0, math.nan], [math.nan, math.nan]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    rewards, kl = apply_kl_penalty(scores, kl_penalty(old, ref, "k1", mask), mask, kl_coef=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1 * LN2, 1 + 0.1 * LN2], [2 - 0.1 * LN2, 0], [0, 0]]))
    assert float(kl) == pytest.approx((0 + LN2) / 2)  # mean over the two rows of their means


def test_full_kl_in_reward() -> None:
    # Coefficient .1, p = (3/4, 1/4) against q = (1/2, 1/2) at both tokens of row 0, and p = q in row 1; 0 beyond it.
    full = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    scores, mask = torch.tensor([[0.0, 1.0], [2.0, math.nan]]), torch.tensor([[1, 1], [1, 0]])
    rewards, kl = apply_kl_penalty(scores, torch.tensor([[full, full], [0.0, math.nan]]), mask, kl_coef=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1 * full, 1 - 0.1 * full], [2, 0]]))
    assert float(kl) == pytest.approx((full + 0) / 2)


def test_adaptive_controller() -> None:
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=2.0, horizon=100.0)
    controller.update(current_kl=2.2, n_steps=10)  # error .1
    assert controller.value == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    controller.update(current_kl=50.0, n_steps=10)  # clipped to .2
    assert controller.value == pytest.approx(0.101 * 1.02)
    restored = AdaptiveKLController(init_kl_coef=0.1, target_kl=2.0, horizon=100.0)
    restored.load_state_dict(controller.state_dict())
    for each in (controller, restored):
        each.update(current_kl=0.0, n_steps=7)
    assert restored.value == controller.value < 0.101 * 1.02
    for start, state in ((0.3, controller.state_dict()), (0.1, {})):  # another coefficient; a fixed controller before
        changed = AdaptiveKLController(init_kl_coef=start, target_kl=2.0, horizon=100.0)
        changed.load_state_dict(state)
        assert changed.value == start


def test_adaptive_controller_never_turns_the_penalty_round() -> None:
    """10 steps of rows for a horizon of 1 would multiply it by 1 - 0.2 * 10 = -1: it halves. 2 multiply it by 0.6."""
    for steps, expected in ((10, 0.05), (2, 0.06)):
        controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=1.0, horizon=1.0)
        controller.update(current_kl=0.0, n_steps=steps)
        assert controller.value == pytest.approx(expected)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_adaptive_controller_outlasts_a_step_without_a_kl(kl: float) -> None:
    """Else every later reward would be NaN, though the step that had none was left out."""
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=1.0, horizon=100.0)
    controller.update(kl, 10)
    assert controller.value == 0.1


def test_adaptive_controller_refuses_a_target_of_zero() -> None:
    with pytest.raises(ValueError, match=r"AdaptiveKLController: target_kl is 0.0; expected a number above 0"):
        AdaptiveKLController(init_kl_coef=0.1, target_kl=0.0, horizon=100.0)


def test_fixed_controller() -> None:
    controller = FixedKLController(0.3)
    controller.update(current_kl=9.0, n_steps=5)
    controller.load_state_dict(controller.state_dict())
    assert controller.value == 0.3
