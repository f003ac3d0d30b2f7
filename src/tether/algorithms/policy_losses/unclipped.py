"""Losses that bound the update by other means than clipping, or not at all."""

import torch
from jaxtyping import Shaped
from torch import Tensor

from tether.algorithms.aggregation import Mean, TokenLoss, bounded_log_ratio, ratio_metrics, weighted
from tether.algorithms.masking import clip, masked_sum, select
from tether.algorithms.registry import NonNegative, Positive
from tether.algorithms.shapes import Mask, Tokens


def gpg(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    rollout_is_weights: Tokens | None = None,
) -> TokenLoss:
    """The plain policy gradient, L = -A log p (GPG, Chu et al. 2025, arXiv 2504.02546).

    It is only correct with one update per rollout; old_log_probs are only used for metrics.

    Assumes: the batch is on-policy: one update, then new samples.
    Use it: with one mini-batch and one epoch, where a clip would have no effect.
    Watch: `actor/ppo_kl`: values far from 0 mean that the data is off-policy.
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

    L = -A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0 and tau_neg elsewhere: its slope at r = 1 is that
    of -A r, and it flattens smoothly on both sides. Aggregate with ``seq-mean-token-mean``.

    Assumes: trust in a token decreases gradually with its distance. Gradients of negative advantages spread over the
        vocabulary, so they need the sharper gate.
    Use it: where hard clipping removes the gradient of many tokens, such as for mixture-of-experts models.
    Watch: `actor/ppo_kl`, `actor/ratio_max`: there is no clip fraction to show how far the policy moved.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=sapo`, `actor_rollout_ref.actor.tau_pos`,
        `actor_rollout_ref.actor.tau_neg`.
    """
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, response_mask)
    advantages = select(advantages, response_mask)
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    return weighted(-advantages * gate, response_mask, rollout_is_weights, ratio_metrics(log_ratio, response_mask))


def dro(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    dro_beta: Positive = 1.0,
    rollout_is_weights: Tokens | None = None,
) -> TokenLoss:
    """A quadratic penalty on log r instead of the clip (DRO, Richemond et al. 2024, arXiv 2405.19107).

    L = -A log p + dro_beta / 2 (log r)^2, minimal at r = exp(A / dro_beta). The penalty per token is verl's; the paper
    penalises the log-ratio of the entire answer.

    Assumes: advantages have a known scale, since dro_beta is in their unit.
    Use it: on stale rollouts or fixed data: every token keeps its gradient, and tokens that moved too far are pulled
        back.
    Watch: `actor/ppo_kl`, `actor/ratio_max`: there is no clip fraction to show how far the policy moved.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=dro`, `actor_rollout_ref.actor.policy_loss.dro_beta`.
    """
    token_log_probs = select(log_probs, response_mask)
    penalty = dro_beta / 2 * (token_log_probs - select(old_log_probs, response_mask)).square()
    loss = penalty - select(advantages, response_mask) * token_log_probs
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, response_mask)
    return weighted(loss, response_mask, rollout_is_weights, ratio_metrics(log_ratio, response_mask))


def topr(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    rollout_is_weights: Tokens | None = None,
) -> TokenLoss:
    """REINFORCE that down-weights bad answers as they become unlikely (TOPR, Le Roux et al. 2025, arXiv 2503.14286).

    L = -sg(w) A log p, where w = 1 for A >= 0, and min(prod_t r_t, 1) over the tokens of the row for A < 0. (ROLL and
    Trinity-RFT use the ratio of each token instead.)

    Assumes: good answers are useful however stale they are, as in supervised training; a bad answer that is already
        unlikely need not become less likely.
    Use it: on stale rollouts or fixed data, with advantages of both signs.
    Watch: `actor/ppo_kl`, `actor/ratio_min`, and `actor/entropy`: nothing limits the increase of good answers'
        probability.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=topr`.
    """
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, response_mask)
    advantages = select(advantages, response_mask)
    row_ratio = masked_sum(log_ratio.detach(), response_mask, dim=-1)[:, None].clamp(max=0).exp()
    weight = torch.where(advantages < 0, row_ratio, 1.0)
    loss = -weight * advantages * select(log_probs, response_mask)
    return weighted(loss, response_mask, rollout_is_weights, ratio_metrics(log_ratio, response_mask))


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
    """PPO without the few tokens that cause entropy collapse (Clip-Cov, Cui et al. 2025, arXiv 2505.22617).

    L = max(-A r, -A clip(r, 1 - low, 1 + high)), and 0 for the tokens ``selected`` by `select_clip_cov`. These stay in
    the denominators of the aggregation. actor/pg_clipfrac is the selected fraction.

    Assumes: a few tokens with both a high probability and a high advantage cause the loss of entropy.
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


def m2po(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    selected: Shaped[Tensor, "B T"],
    rollout_is_weights: Tokens | None = None,
) -> TokenLoss:
    """Policy gradient without the few tokens with the largest log-ratios (M2PO, Zheng et al. 2025, arXiv 2510.01161).

    L = -A r, and 0 for the tokens ``selected`` by `select_m2po`. These stay in the denominators of the aggregation.

    Assumes: stale rollouts are still informative, apart from a few outliers.
    Use it: on rollouts that are many updates old, where a clip would drop rare but important tokens.
    Watch: `actor/pg_clipfrac`, the share of dropped tokens, which should be far below that of `vanilla`;
        `actor/ratio_max`.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=m2po`, `actor_rollout_ref.actor.policy_loss.m2_threshold`.
    """
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, response_mask)
    loss = select(-select(advantages, response_mask) * log_ratio.exp(), ~selected.bool())
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
    """Policy gradient with a penalty on the tokens that cause entropy collapse (KL-Cov, arXiv 2505.22617).

    L = -A r, plus ppo_kl_coef |log r| for the tokens ``selected`` by `select_kl_cov`.

    Assumes: the same as `clip_cov`.
    Use it: where `clip_cov` loses too much signal: the selected tokens still contribute a gradient, but with a penalty.
    Watch: `actor/entropy`, `actor/ppo_kl_abs`.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov`, `actor_rollout_ref.actor.policy_loss.kl_cov_ratio`,
        `actor_rollout_ref.actor.policy_loss.ppo_kl_coef`.
    """
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, response_mask)
    penalty = torch.where(selected.bool(), ppo_kl_coef * log_ratio.abs(), 0.0)
    loss = -select(advantages, response_mask) * log_ratio.exp() + penalty
    metrics = ratio_metrics(log_ratio, response_mask) | {"actor/ppo_kl_abs": Mean.of(log_ratio.abs(), response_mask)}
    return weighted(loss, response_mask, rollout_is_weights, metrics)
