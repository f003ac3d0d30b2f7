"""The critic's loss, and the share of the returns' variance that it explains."""

import torch

from tether.algorithms.aggregation import Mean, Metric, TokenLoss
from tether.algorithms.masking import clip, masked_mean, masked_var, select
from tether.algorithms.registry import Positive
from tether.algorithms.shapes import Mask, Scalar, Tokens

EQUAL_RETURNS = 1e-12
"""Returns whose variance is below this share of their mean square count as equal."""


def value_loss(
    values: Tokens,
    old_values: Tokens,
    returns: Tokens,
    response_mask: Mask,
    *,
    cliprange_value: Positive | None,
    huber_delta: Positive | None = None,
) -> TokenLoss:
    """PPO's clipped value loss per token, as in PPO's code but not its paper (Engstrom et al. 2020, arXiv 2005.12729).

    L = max(h(V - R), h(clip(V, V_old - c, V_old + c) - R)) with c = cliprange_value.
    h(e) = e^2 / 2, including the factor 1/2; or, with huber_delta, e^2 / 2 up to |e| = delta, and
    delta (|e| - delta / 2) beyond (RLinf's ``value_clip`` and ``huber_delta``). cliprange_value=None: no clip.

    Assumes: the critic should change slowly, like the policy. With large rewards the clip is always active: scale c
        with them.
    Use it: squared by default; huber_delta where a few returns are extreme.
    Watch: `critic/vf_clipfrac` (near 1: the clip is too tight), `critic/vf_loss`, `critic/vf_explained_var`.
    Keys: `critic.cliprange_value`, `critic.huber_delta`, `critic.loss_agg_mode`.
    """
    values, old_values = select(values, response_mask), select(old_values.detach(), response_mask)
    returns = select(returns.detach(), response_mask)
    unclipped = _penalty(values - returns, huber_delta)
    clipped = unclipped
    if cliprange_value is not None:
        near_old = clip(values, old_values - cliprange_value, old_values + cliprange_value)
        clipped = _penalty(near_old - returns, huber_delta)
    loss = torch.maximum(unclipped, clipped)
    metrics: dict[str, Metric] = {
        "critic/vf_loss": Mean.of(loss, response_mask),
        "critic/vf_clipfrac": Mean.of(clipped > unclipped, response_mask),
        "critic/vpred_mean": Mean.of(values, response_mask),
    }
    return TokenLoss(loss, metrics)


@torch.no_grad()
def explained_variance(values: Tokens, returns: Tokens, response_mask: Mask) -> Scalar:
    """Return 1 - var(R - V) / var(R): 1 is perfect, 0 is no better than a constant, and below 0 is worse.

    It is 0 if all returns are equal up to float32 rounding, and NaN if a value or a return is not finite.
    """
    values, returns = select(values, response_mask), select(returns, response_mask)
    total = masked_var(returns, response_mask)
    residual = masked_var(returns - values, response_mask)
    # Equal returns have no variance to explain, and the quotient would only amplify rounding errors.
    equal = total <= EQUAL_RETURNS * masked_mean(returns.square(), response_mask)
    return torch.where(equal, 0.0 * residual, 1 - residual / total)


def _penalty(error: Tokens, huber_delta: float | None) -> Tokens:
    if huber_delta is None:
        return 0.5 * error.square()
    return torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=huber_delta)
