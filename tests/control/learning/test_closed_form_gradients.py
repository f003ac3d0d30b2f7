"""The closed forms are the derivatives of `tether.algorithms`, wherever a clip binds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.algorithms import POLICY_LOSSES, value_loss
from tether.control.learning.losses import policy_gradient, value_gradient, vanilla_gradient


def numbers(seed, count=64):
    """Ratios far inside and far outside of every clip, among them beyond the bound of the log-ratio."""
    generator = torch.Generator().manual_seed(seed)
    old, advantages, returns = torch.randn(3, count, 1, dtype=torch.float64, generator=generator)
    spread = torch.tensor([0.05, 0.5, 3.0, 30.0], dtype=torch.float64).repeat(count // 4)[:, None]
    return old + spread * torch.randn(count, 1, dtype=torch.float64, generator=generator), old, advantages, returns


@given(st.integers(0, 10**6), st.sampled_from([None, 1.5, 3.0]), st.sampled_from([0.1, 0.3]))
@settings(max_examples=40, deadline=None)
def test_vanilla(seed, dual_clip, high):
    log_probs, old, advantages, _ = numbers(seed)
    options = {"clip_ratio_low": 0.2, "clip_ratio_high": high, "clip_ratio_c": dual_clip}
    leaf = log_probs.clone().requires_grad_()
    mask = torch.ones_like(leaf, dtype=torch.bool)
    (expected,) = torch.autograd.grad(POLICY_LOSSES["vanilla"](leaf, old, advantages, mask, **options).loss.sum(), leaf)
    found = policy_gradient("vanilla", options, {})(log_probs, old, advantages, None, torch.Generator())
    torch.testing.assert_close(found.by_log_probs, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_without_options_it_is_the_gradient_of_the_loss_without_options(seed):
    log_probs, old, advantages, _ = numbers(seed)
    leaf = log_probs.clone().requires_grad_()
    mask = torch.ones_like(leaf, dtype=torch.bool)
    (expected,) = torch.autograd.grad(POLICY_LOSSES["vanilla"](leaf, old, advantages, mask).loss.sum(), leaf)
    torch.testing.assert_close(vanilla_gradient(log_probs, old, advantages), expected, rtol=1e-12, atol=1e-12)


def test_another_loss_goes_through_autograd():
    log_probs, old, advantages, _ = numbers(0)
    gradient = policy_gradient("cispo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}, {})
    found = gradient(log_probs, old, advantages, None, torch.Generator()).by_log_probs
    clipped = (log_probs - old).clamp(-20, 20).exp().clamp(0.8, 1.2)
    torch.testing.assert_close(found, -clipped * advantages)


@given(st.integers(0, 10**6), st.sampled_from([None, 0.1, 1.0]), st.sampled_from([None, 0.5]))
@settings(max_examples=40, deadline=None)
def test_value(seed, clip, delta):
    values, old, _, returns = numbers(seed)
    leaf = values.clone().requires_grad_()
    options = {"cliprange_value": clip, "huber_delta": delta}
    mask = torch.ones_like(leaf, dtype=torch.bool)
    (expected,) = torch.autograd.grad(value_loss(leaf, old, returns, mask, **options).loss.sum(), leaf)
    torch.testing.assert_close(value_gradient(values, old, returns, **options), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_by_hand(ratio, advantage):
    binds = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
    log_prob = torch.tensor([[ratio]], dtype=torch.float64).log()
    options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None}
    gradient = policy_gradient("vanilla", options, {})
    found = gradient(log_prob, torch.zeros_like(log_prob), torch.tensor([[advantage]]), None, torch.Generator())
    assert found.by_log_probs.item() == pytest.approx(0.0 if binds else -advantage * ratio)
