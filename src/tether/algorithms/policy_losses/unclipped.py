"""Losses that bound the update by other means than clipping, or not at all."""

import torch
from jaxtyping import Shaped
from torch import Tensor

from tether.algorithms.checks import NonNegative, Positive
from tether.algorithms.masking import clip, select
from tether.algorithms.shapes import Mask, Tokens
from tether.algorithms.token_loss import Mean, TokenLoss, bounded_log_ratio, ratio_metrics, weighted


def gpg(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    rollout_is_weights: Tokens | None = None,
) -> TokenLoss:
    """The plain policy gradient, L = -A log p (GPG, Chu et al. 2025, arXiv 2504.02546).

    Right for one update per rollout; old_log_probs only serve the metrics.

    Assumes: the batch is on-policy: one update, then new samples.
    Use it: with one mini-batch and one epoch, where a clip could never act.
    Watch: `actor/ppo_kl`: anything but about 0 means that it is used off-policy.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=gpg`.
    """
    loss = -select(advantages, response_mask) * select(log_probs, response_mask)
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, response_mask)
    return weighted(loss, response_mask, rollout_is_weights, ratio_metrics(log_ratio, response_mask))


def sapo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    tau_pos: Positive = 1.0,
    tau_neg: Positive = 1.05,
    rollout_is_weights: Tokens | None = None,
) -> TokenLoss:
    """A soft gate instead of the clip (SAPO, Gao et al. 2025, arXiv 2511.20347).

    L = -A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0 and tau_neg elsewhere: slope A at r = 1, fading
    smoothly on both sides. Aggregate with ``seq-mean-token-mean``.

    Assumes: trust fades with distance; there is no edge where it ends. Negative advantages spread over the vocabulary
        and need the sharper gate.
    Use it: where hard clipping starves many tokens of gradient, such as mixture-of-experts models.
    Watch: `actor/ppo_kl`, `actor/ratio_max`: no clip fraction tells how far the policy went.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=sapo`, `actor_rollout_ref.actor.tau_pos`,
        `actor_rollout_ref.actor.tau_neg`.
    """
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, response_mask)
    advantages = select(advantages, response_mask)
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    return weighted(-advantages * gate, response_mask, rollout_is_weights, ratio_metrics(log_ratio, response_mask))


def clip_cov(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    selected: Shaped[Tensor, "B T"],
    clip_ratio_low: NonNegative = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    rollout_is_weights: Tokens | None = None,
) -> TokenLoss:
    """PPO without the few tokens that make the entropy collapse (Clip-Cov, Cui et al. 2025, arXiv 2505.22617).

    L = max(-A r, -A clip(r, 1 - low, 1 + high)), and 0 for the tokens ``selected`` by `select_clip_cov`. These stay in
    the denominators of the aggregation. actor/pg_clipfrac is the fraction that was selected.

    Assumes: entropy falls by few tokens: those where a high probability meets a high advantage.
    Use it: where `actor/entropy` collapses early and the score stalls.
    Watch: `actor/entropy`, `actor/pg_clipfrac`.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov`,
        `actor_rollout_ref.actor.policy_loss.clip_cov_ratio`, `actor_rollout_ref.actor.policy_loss.clip_cov_lb`,
        `actor_rollout_ref.actor.policy_loss.clip_cov_ub`, `actor_rollout_ref.actor.clip_ratio_low`,
        `actor_rollout_ref.actor.clip_ratio_high`.
    """
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, response_mask)
    ratio, advantages = log_ratio.exp(), select(advantages, response_mask)
    clipped = clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    loss = torch.where(selected.bool(), 0.0, torch.maximum(-advantages * ratio, -advantages * clipped))
    metrics = ratio_metrics(log_ratio, response_mask) | {"actor/pg_clipfrac": Mean.of(selected, response_mask)}
    return weighted(loss, response_mask, rollout_is_weights, metrics)


def kl_cov(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    selected: Shaped[Tensor, "B T"],
    ppo_kl_coef: NonNegative = 0.1,
    rollout_is_weights: Tokens | None = None,
) -> TokenLoss:
    """Policy gradient with a penalty on the tokens that make the entropy collapse (KL-Cov, arXiv 2505.22617).

    L = -A r, and + ppo_kl_coef |log r| for the tokens ``selected`` by `select_kl_cov`.

    Assumes: as `clip_cov`.
    Use it: where `clip_cov` loses too much signal: the tokens still learn, but slowly.
    Watch: `actor/entropy`, `actor/ppo_kl_abs`.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov`, `actor_rollout_ref.actor.policy_loss.kl_cov_ratio`,
        `actor_rollout_ref.actor.policy_loss.ppo_kl_coef`.
    """
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, response_mask)
    penalty = torch.where(selected.bool(), ppo_kl_coef * log_ratio.abs(), 0.0)
    loss = -select(advantages, response_mask) * log_ratio.exp() + penalty
    metrics = ratio_metrics(log_ratio, response_mask) | {"actor/ppo_kl_abs": Mean.of(log_ratio.abs(), response_mask)}
    return weighted(loss, response_mask, rollout_is_weights, metrics)
