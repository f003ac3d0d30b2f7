"""Losses that clip the importance ratio of each token."""

import torch

from tether.algorithms.aggregation import Mean, TokenLoss, bounded_log_ratio, ratio_metrics, weighted
from tether.algorithms.masking import clip, select, widen
from tether.algorithms.registry import AboveOne, NonNegative, Positive
from tether.algorithms.shapes import Mask, RowIds, Tokens


def vanilla(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    clip_ratio_low: NonNegative = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    clip_ratio_c: AboveOne | None = 3.0,
    rollout_is_weights: Tokens | None = None,
) -> TokenLoss:
    """PPO's clipped loss (Schulman et al. 2017, arXiv 1707.06347) with dual clip (Ye et al. 2019, arXiv 1912.09729).

    With r = p / p_old: L = max(-A r, -A clip(r, 1 - low, 1 + high)), bounded above by -A c where A < 0, so that one
    token with an exploding ratio cannot dominate. ``high`` > ``low`` is DAPO's clip-higher; c=None disables the dual
    clip.

    Assumes: old_log_probs are those of the sampling policy, or close to it.
    Use it: first; each other loss addresses a problem of this one.
    Watch: `actor/pg_clipfrac` (about 0 to 0.2; if it is far higher, lower the learning rate or the epochs),
        `actor/ppo_kl`, `actor/pg_clipfrac_lower`.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=vanilla`, `actor_rollout_ref.actor.clip_ratio`,
        `actor_rollout_ref.actor.clip_ratio_low`, `actor_rollout_ref.actor.clip_ratio_high`,
        `actor_rollout_ref.actor.clip_ratio_c`.
    """
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, response_mask)
    ratio, advantages = log_ratio.exp(), select(advantages, response_mask)
    unclipped = -advantages * ratio
    clipped = -advantages * clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    loss = torch.maximum(unclipped, clipped)
    capped = torch.zeros_like(loss, dtype=torch.bool)
    if clip_ratio_c is not None:
        cap = -advantages * clip_ratio_c
        capped = (advantages < 0) & (loss > cap)
        loss = torch.where(capped, cap, loss)
    metrics = ratio_metrics(log_ratio, response_mask) | {
        "actor/pg_clipfrac": Mean.of(clipped > unclipped, response_mask),
        "actor/pg_clipfrac_lower": Mean.of(capped, response_mask),
    }
    return weighted(loss, response_mask, rollout_is_weights, metrics)


def cispo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    clip_ratio_low: NonNegative = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    rollout_is_weights: Tokens | None = None,
) -> TokenLoss:
    """REINFORCE with a clipped ratio as a constant weight (CISPO, MiniMax 2025, arXiv 2506.13585).

    L = -sg(clip(r, 1 - low, 1 + high)) A log p, with sg stopping the gradient: every token keeps its gradient, which
    clipped tokens lose with `vanilla`.

    Assumes: a ratio far from 1 marks an important token, not one to exclude.
    Use it: with several updates on each batch, where clipping would remove rare tokens that start a reflection.
    Watch: `actor/pg_clipfrac`, and `actor/ppo_kl`, because only the clipped weight limits the update.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=cispo`, `actor_rollout_ref.actor.clip_ratio_low`,
        `actor_rollout_ref.actor.clip_ratio_high`.
    """
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, response_mask)
    ratio = log_ratio.detach().exp()
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss = -clipped * select(advantages, response_mask) * select(log_probs, response_mask)
    metrics = ratio_metrics(log_ratio, response_mask) | {"actor/pg_clipfrac": Mean.of(clipped != ratio, response_mask)}
    return weighted(loss, response_mask, rollout_is_weights, metrics)


def decoupled(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    rollout_log_probs: Tokens,
    clip_ratio_low: NonNegative = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    clip_ratio_c: AboveOne | None = 3.0,
    behave_weight_threshold: Positive | None = None,
) -> TokenLoss:
    """PPO for stale rollouts: clip around a proximal policy, weight by the behaviour policy (Hilton et al. 2110.00641).

    L = w * `vanilla`, where old_log_probs are those of the proximal policy (recomputed, or `interpolate_proximal`)
    and w = p_old / p_rollout. Tokens with w over behave_weight_threshold are dropped: their loss is 0, but they stay
    in the denominators of the aggregation. RLinf's ``decoupled_actor_critic`` without its value loss.

    Assumes: the rollout is stale: the sampling policy is several updates behind the policy that the clip should be
        relative to.
    Use it: with asynchronous or replayed rollouts; on fresh ones w is 1, and it equals `vanilla`.
    Watch: `actor/behave_weight_mean`, which is 1 on fresh rollouts, and `actor/behave_dropped`.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=decoupled`,
        `actor_rollout_ref.actor.policy_loss.behave_weight_threshold`, and the keys of `vanilla`.
    """
    clipped = vanilla(
        log_probs,
        old_log_probs,
        advantages,
        response_mask,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
    )
    weight = bounded_log_ratio(old_log_probs, rollout_log_probs, response_mask).exp().detach()
    accepted = torch.ones_like(weight, dtype=torch.bool)
    if behave_weight_threshold is not None:
        accepted = weight <= behave_weight_threshold
    metrics = clipped.metrics | {
        "actor/behave_weight_mean": Mean.of(weight, response_mask),
        "actor/behave_dropped": Mean.of(~accepted, response_mask),
    }
    return TokenLoss(clipped.loss * select(weight, accepted), metrics)


@torch.no_grad()
def interpolate_proximal(
    log_probs: Tokens, rollout_log_probs: Tokens, *, sample_version: RowIds, current_version: int
) -> Tokens:
    """Interpolate the proximal policy between the sampler and the current policy, without a forward pass (RLinf).

    log p_old = log p_rollout + alpha (log p - log p_rollout), without gradient, with alpha = (v - 1 - u) / (v - u) in
    [0, 1] for rows sampled by version u while the trainer is at version v; alpha = 0 where u >= v.
    """
    log_probs, rollout_log_probs = widen(log_probs), widen(rollout_log_probs)
    age = (current_version - sample_version).to(rollout_log_probs.dtype)
    alpha = torch.where(age > 0, (age - 1) / age.clamp(min=1), 0.0)
    return rollout_log_probs + alpha[:, None] * (log_probs - rollout_log_probs)
