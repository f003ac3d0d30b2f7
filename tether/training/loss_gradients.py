"""Closed forms of the gradients of PPO's losses, for networks so small that autograd costs more than they do.

Each function is the derivative of one in `tether.algorithms`, which stays the definition: tests hold the two together
in float64. A loss without a closed form is differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tether.algorithms import POLICY_LOSSES
from tether.algorithms.ratio import MAX_LOG_RATIO

CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
PolicyGradient = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log_probs, old_log_probs, advantages), [B, L] each -> derivative of the sum of the losses by log_probs."""


def vanilla_gradient(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = None,
) -> Tensor:
    """Differentiate ``POLICY_LOSSES["vanilla"]`` by the log-probabilities, [B, L].

    With r = p / p_old the loss -A r has the derivative -A r; where a clip or the dual clip binds, it is a constant.
    """
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()
    unclipped = -advantages * ratio
    live = unclipped >= -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    live &= log_ratio.abs() <= MAX_LOG_RATIO
    if clip_ratio_c is not None:
        live &= (advantages >= 0) | (unclipped <= -advantages * clip_ratio_c)
    return unclipped * live


def value_gradient(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange_value: float | None, huber_delta: float | None
) -> Tensor:
    """Differentiate `tether.algorithms.value_loss` by the values, [B, 1].

    The larger of the losses of V and of the clipped V counts; the clipped one has no derivative where the clip binds.
    Both being functions of the distance |V - R| alone, the larger loss is that of the larger distance.
    """
    error = values - returns
    gradient = error if huber_delta is None else error.clamp(-huber_delta, huber_delta)
    if cliprange_value is None:
        return gradient
    near_old = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    return gradient * (error.abs() >= (near_old - returns).abs())


def policy_gradient(name: str, options: Mapping[str, float | None]) -> PolicyGradient:
    """The gradient of a policy loss: its closed form, or autograd.

    Args:
        name: in ``POLICY_LOSSES``.
        options: keywords of the loss.
    """
    if name == "vanilla":
        clips: dict[str, Any] = {key: options[key] for key in CLIPS if key in options}
        return lambda log_probs, old, advantages: vanilla_gradient(log_probs, old, advantages, **clips)

    def differentiate(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = log_probs.detach().requires_grad_()
            mask = torch.ones_like(leaf, dtype=torch.bool)
            loss = POLICY_LOSSES[name](leaf, old_log_probs, advantages, mask, **options)
            (gradient,) = torch.autograd.grad(loss.loss.sum(), [leaf])
        return gradient

    return differentiate
