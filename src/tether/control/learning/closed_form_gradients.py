"""Closed-form gradients of PPO's losses, for networks so small that autograd costs more than they do.

Each function is the derivative of one in `tether.algorithms`, which is the definition: tests compare the two in
float64. A loss without a closed form is differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether.algorithms import MAX_LOG_RATIO, TOKEN_SELECTIONS, TokenLoss
from tether.loop.own_functions import policy_loss

CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


@dataclass(frozen=True)
class LossGradient:
    """The gradient of the sum of the losses of all elements [B, L]."""

    by_log_probs: Tensor
    """[B, L]"""
    loss: TokenLoss | None = None
    """The losses, if they were computed for the gradient."""


Draws = Callable[[], torch.Generator]
"""Creates the random generator, if a loss needs one."""
PolicyGradient = Callable[[Tensor, Tensor, Tensor, Tensor | None, Draws], LossGradient]
"""Called with (log_probs, old_log_probs, advantages, mask or None, draws), [B, L] each."""


def vanilla_gradient(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
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


def policy_gradient(name: str, options: Mapping[str, float | None], selection: Mapping[str, float]) -> PolicyGradient:
    """Return a function that computes the gradient of a policy loss, in closed form or by autograd.

    Args:
        name: a key of ``POLICY_LOSSES``.
        options: keyword arguments of the loss.
        selection: keyword arguments of ``TOKEN_SELECTIONS[name]``, if the loss treats some tokens differently.
    """
    if name == "vanilla":
        clips: dict[str, Any] = {key: options[key] for key in CLIPS if key in options}

        def closed_form(
            log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor | None, draws: Draws
        ) -> LossGradient:
            gradient = vanilla_gradient(log_probs, old, advantages, **clips)
            return LossGradient(gradient if mask is None else torch.where(mask, gradient, 0.0))

        return closed_form

    policy_loss(name)  # checks a user's function before the run begins
    select = TOKEN_SELECTIONS.get(name)

    def differentiate(
        log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor | None, draws: Draws
    ) -> LossGradient:
        mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
        keywords: dict[str, object] = {"rollout_log_probs": old, **options}
        if select is not None:
            keywords["selected"] = select(log_probs, old, advantages, mask, generator=draws(), **selection)
        with torch.enable_grad():
            leaf = log_probs.detach().requires_grad_()
            loss = policy_loss(name)(leaf, old, advantages, mask, **keywords)
            (gradient,) = torch.autograd.grad(loss.loss.sum(), [leaf])
        return LossGradient(gradient, TokenLoss(loss.loss.detach(), loss.metrics))

    return differentiate
