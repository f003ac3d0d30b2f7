"""Losses with one ratio per sequence; aggregate both with ``seq-mean-token-mean``."""

import torch

from tether.algorithms.aggregation import Mean, TokenLoss, bounded_log_ratio, ratio_metrics, weighted
from tether.algorithms.masking import clip, masked_mean, select, spread
from tether.algorithms.registry import NonNegative
from tether.algorithms.shapes import Mask, Tokens


def gspo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    clip_ratio_low: NonNegative = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    rollout_is_weights: Tokens | None = None,
) -> TokenLoss:
    """PPO with the geometric mean of a row's ratios (GSPO-token, Zheng et al. 2025, arXiv 2507.18071).

    s_t = exp(sg(mean_t log r_t) + log p_t - sg(log p_t)): all tokens of a row have the same value, but each has its own
    gradient. L = max(-A s, -A clip(s, 1 - low, 1 + high)). The paper clips at 3e-4 and 4e-4, far tighter than
    token ratios, since the mean of many log ratios varies little. log s is bounded by 10.

    Assumes: the reward is for the entire answer, so the ratio should be too.
    Use it: where token ratios are noisy: long answers, mixture-of-experts models.
    Watch: `actor/pg_clipfrac`: the paper sees 0.15, far more than with `vanilla`; at 0 the clip range is probably meant
        for token ratios.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=gspo`, `actor_rollout_ref.actor.clip_ratio_low`,
        `actor_rollout_ref.actor.clip_ratio_high`.
    """
    token_log_probs = select(log_probs, response_mask)
    log_ratio = token_log_probs - select(old_log_probs, response_mask)
    row_log_ratio = masked_mean(log_ratio, response_mask, dim=-1)[:, None]
    ratio = (token_log_probs - token_log_probs.detach() + row_log_ratio.detach()).clamp(max=10.0).exp()
    advantages = select(advantages, response_mask)
    unclipped = -advantages * ratio
    clipped = -advantages * clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    bounded = bounded_log_ratio(log_probs, old_log_probs, response_mask)
    metrics = ratio_metrics(bounded, response_mask) | {"actor/pg_clipfrac": Mean.of(clipped > unclipped, response_mask)}
    return weighted(torch.maximum(unclipped, clipped), response_mask, rollout_is_weights, metrics)


def geo_mean(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    clip_ratio_low: NonNegative = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    rollout_is_weights: Tokens | None = None,
) -> TokenLoss:
    """The geometric mean of a row's clipped ratios (GMPO, Zhao et al. 2025, arXiv 2507.20673).

    e_t = sgn(A_t) min(sgn(A_t) d_t, sgn(A_t) clip(d_t, -low, high)) with d = log r: the clip acts on the *log* ratio.
    L = -mean_t(A_t) exp(mean_t e_t), the same for all tokens of the row, so that ``seq-mean-token-mean`` gives the
    mean over rows. Rollout weights are combined by their geometric mean as well.

    Assumes: a single outlier among a row's ratios should not dominate the row.
    Use it: where single tokens with huge ratios destabilise `vanilla`; the paper uses a wide clip of 0.4.
    Watch: `actor/pg_clipfrac`, `actor/ratio_max`.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean`, `actor_rollout_ref.actor.clip_ratio_low`,
        `actor_rollout_ref.actor.clip_ratio_high`.
    """
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, response_mask)
    advantages = select(advantages, response_mask)
    clipped = clip(log_ratio, -clip_ratio_low, clip_ratio_high)
    sign = advantages.sign()
    bounded = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio = masked_mean(bounded, response_mask, dim=-1).exp()
    row_loss = -masked_mean(advantages, response_mask, dim=-1) * ratio
    if rollout_is_weights is not None:
        row_loss = row_loss * masked_mean(select(rollout_is_weights, response_mask).log(), response_mask, dim=-1).exp()
    outside = clipped != log_ratio
    metrics = ratio_metrics(log_ratio, response_mask) | {
        "actor/pg_clipfrac": Mean.of(outside & (advantages > 0), response_mask),
        "actor/pg_clipfrac_lower": Mean.of(outside & (advantages < 0), response_mask),
    }
    return TokenLoss(spread(row_loss, response_mask), metrics)
