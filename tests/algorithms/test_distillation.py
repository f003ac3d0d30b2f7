"""Distillation from a teacher: numbers worked by hand, and verl's loss of August 2026."""

import math

import pytest
import torch
from torch import Tensor

from tests.algorithms.cases import make_case
from tether.algorithms import distillation_loss, forward_kl_topk, kl_penalty

LN2 = math.log(2)
KL = torch.tensor([[LN2, -LN2, 0.5]], dtype=torch.float64)
OLD = torch.full((1, 3), -1.0, dtype=torch.float64)
RATIO = math.log(1.5)  # of the policy to the old one
MASK = torch.tensor([[1, 1, 0]])


def test_the_kl_is_the_loss_or_minus_the_advantage_of_a_clipped_one() -> None:
    log_probs = (OLD + RATIO).requires_grad_()
    whole = distillation_loss(KL, log_probs, OLD, MASK)
    assert whole.loss.tolist() == [[LN2, -LN2, 0]]
    assert float(whole.metrics["distillation/kl"]) == 0
    assert distillation_loss(KL, log_probs, OLD, MASK, loss_max_clamp=0.25).loss.tolist() == [[0.25, -0.25, 0]]
    # advantages -log 2 and log 2, ratio 1.5: 1.5 log 2, and -1.2 log 2, which is clipped and has no gradient
    taught = distillation_loss(KL, log_probs, OLD, MASK, use_policy_gradient=True)
    assert taught.loss[0].tolist() == pytest.approx([1.5 * LN2, -1.2 * LN2, 0])
    assert float(taught.metrics["distillation/pg_clipfrac"]) == 0.5
    (gradient,) = torch.autograd.grad(taught.loss.sum(), log_probs)
    assert gradient[0].tolist() == pytest.approx([1.5 * LN2, 0, 0])
    wide = {"clip_ratio_high": 0.4, "rollout_is_weights": torch.full((1, 3), 0.5, dtype=torch.float64)}
    taught = distillation_loss(KL, log_probs, OLD, MASK, use_policy_gradient=True, loss_max_clamp=0.1, **wide)
    assert taught.loss[0].tolist() == pytest.approx([0.5 * 1.5 * 0.1, -0.5 * 1.4 * 0.1, 0])


def verl_estimate(log_prob: Tensor, teacher: Tensor, mode: str) -> Tensor:
    """verl's estimate of the KL from sampled tokens."""
    if mode == "k1":
        return log_prob - teacher
    if mode == "k2":
        return 0.5 * (log_prob - teacher) ** 2
    minus = (teacher - log_prob).clamp(-20, 20)
    return (minus.exp() - minus - 1).clamp(-10, 10)


def verl_policy_gradient(losses: Tensor, log_prob: Tensor, old: Tensor, low: float, high: float) -> Tensor:
    """verl's clipped loss with minus the KL as the advantage, and its default bound of 3 for negative ones."""
    advantage, ratio = -losses.detach(), (log_prob - old).clamp(-20, 20).exp()
    clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    return torch.where(advantage < 0, torch.minimum(-advantage * 3, clipped), clipped)


@pytest.mark.parametrize("mode", ["k1", "k2", "k3"])
def test_it_is_verls_loss(mode: str) -> None:
    case = make_case(3, 9, 7)
    mask, old, teacher = case.mask.bool(), case.old_log_probs, case.ref_log_probs - 1.0
    for clamp in (None, 0.8):
        for policy_gradient in (False, True):
            ours, theirs = (case.log_probs.detach().clone().requires_grad_() for _ in range(2))
            expected = verl_estimate(theirs, teacher, mode)
            if clamp is not None:
                expected = expected.clamp(-clamp, clamp)
            if policy_gradient:
                expected = verl_policy_gradient(expected, theirs, old, 0.1, 0.3)
            found = distillation_loss(
                kl_penalty(ours, teacher, mode, mask),
                ours,
                old,
                mask,
                loss_max_clamp=clamp,
                use_policy_gradient=policy_gradient,
                clip_ratio_low=0.1,
                clip_ratio_high=0.3,
            ).loss
            torch.testing.assert_close(found[mask], expected[mask])
            gradients = (torch.autograd.grad(loss[mask].sum(), x)[0] for loss, x in ((found, ours), (expected, theirs)))
            torch.testing.assert_close(*gradients)


def test_the_forward_kl_over_the_likeliest_tokens_by_hand() -> None:
    q, p = (
        torch.tensor(values, dtype=torch.float64).log() for values in ([1 / 2, 3 / 8, 1 / 8], [1 / 4, 1 / 4, 1 / 2])
    )
    first, second, third = 0.5 * LN2, 3 / 8 * math.log(1.5), 1 / 8 * math.log(1 / 4)
    for topk, expected in ((1, first), (2, first + second), (3, first + second + third), (9, first + second + third)):
        assert forward_kl_topk(p, q, topk=topk).item() == pytest.approx(expected)
    # 1/4 becomes 3/8 for the policy, and the teacher's 1/2 stays
    bounded = forward_kl_topk(p, q, topk=1, log_prob_min_clamp=math.log(3 / 8))
    assert bounded.item() == pytest.approx(0.5 * math.log(4 / 3))
    # a policy that is surer of the likeliest token than the teacher: 1/2 log(2/3) would be negative
    surer = torch.tensor([3 / 4, 1 / 8, 1 / 8], dtype=torch.float64).log()
    assert forward_kl_topk(surer, q, topk=1).item() == 0
    impossible = torch.tensor([0.0, -math.inf])  # to the teacher
    assert forward_kl_topk(torch.zeros(2), impossible, topk=2).item() == pytest.approx(LN2)


def test_it_is_verls_forward_kl() -> None:
    draw = torch.Generator().manual_seed(0)
    ours, theirs, teacher = (torch.randn(4, 5, 11, generator=draw, dtype=torch.float64) * 3 for _ in range(3))
    theirs = ours.clone().requires_grad_()
    ours.requires_grad_()
    for bound in (None, -2.0):
        teacher_log_probs, ids = teacher.log_softmax(-1).topk(4)
        student_log_probs = theirs.log_softmax(-1).gather(-1, ids)
        if bound is not None:
            teacher_log_probs, student_log_probs = (x.clamp_min(bound) for x in (teacher_log_probs, student_log_probs))
        expected = (teacher_log_probs.exp() * (teacher_log_probs - student_log_probs)).sum(-1).clamp_min(0.0)
        found = forward_kl_topk(ours, teacher, topk=4, log_prob_min_clamp=bound)
        torch.testing.assert_close(found, expected)
        gradients = (torch.autograd.grad(kl.sum(), x)[0] for kl, x in ((found, ours), (expected, theirs)))
        torch.testing.assert_close(*gradients)
