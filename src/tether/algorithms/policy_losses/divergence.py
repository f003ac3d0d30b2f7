"""Losses that exclude tokens whose probability has changed too much, whatever their ratio."""

from jaxtyping import Bool
from torch import Tensor

from tether.algorithms.aggregation import Mean, TokenLoss, bounded_log_ratio, ratio_metrics, weighted
from tether.algorithms.masking import select
from tether.algorithms.registry import AboveOne, NonNegative
from tether.algorithms.shapes import Mask, Tokens


def dppo_tv(
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
    """REINFORCE without tokens whose probability changed too much (DPPO-Binary-TV, Qi et al. 2026, arXiv 2602.04879).

    L = -sg(min(r, c)) A log p, and 0 where A > 0 and p - p_old > high, or A <= 0 and p - p_old < -low. The distance is
    the total variation between the two policies with all tokens but the sampled one merged into one. A clip of the
    ratio excludes a rare token whose probability hardly changed, and keeps a frequent one whose probability changed a
    lot.

    Assumes: tokens have probabilities, so not for densities of continuous actions; old_log_probs are those of the
        sampling policy, or close to it.
    Use it: for large vocabularies and mixture-of-experts models, where ratios of rare tokens are noise. verl's script
        uses 0.15 on both sides and, for an unbiased weight, c = 10000.
    Watch: `actor/pg_clipfrac`, the share of excluded tokens; `actor/pg_clipfrac_lower`, the share with r > c.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv`, `actor_rollout_ref.actor.clip_ratio_low`,
        `actor_rollout_ref.actor.clip_ratio_high`, `actor_rollout_ref.actor.clip_ratio_c`.
    """
    moved = (select(log_probs, response_mask).exp() - select(old_log_probs, response_mask).exp()).detach()
    advantage = select(advantages, response_mask)
    left_out = (advantage > 0) & (moved > clip_ratio_high) | (advantage <= 0) & (moved < -clip_ratio_low)
    return _truncated(log_probs, old_log_probs, advantages, response_mask, left_out, clip_ratio_c, rollout_is_weights)


def dppo_kl(
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
    """`dppo_tv` with a KL divergence as the distance (DPPO-Binary-KL, Qi et al. 2026, arXiv 2602.04879).

    With d = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), with 1e-8 added to numerator and denominator
    of the last fraction: L = -sg(min(r, c)) A log p, and 0 where A > 0, p > p_old and d > high, or A <= 0, p < p_old
    and d > low.

    Assumes: the same as `dppo_tv`.
    Use it: like `dppo_tv`, where a probability that falls to almost 0 should count more. verl's script uses 0.05 on
        both sides.
    Watch: the same as for `dppo_tv`.
    Keys: `actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl`, and the other keys of `dppo_tv`.
    """
    log_p, log_old = select(log_probs, response_mask).detach(), select(old_log_probs, response_mask)
    p, old = log_p.exp(), log_old.exp()
    rest, old_rest = (1 - p).clamp(min=0) + 1e-8, (1 - old).clamp(min=0) + 1e-8
    divergence = old * (log_old - log_p) + (1 - old) * (old_rest / rest).log()
    advantage = select(advantages, response_mask)
    too_high = (advantage > 0) & (p > old) & (divergence > clip_ratio_high)
    too_low = (advantage <= 0) & (p < old) & (divergence > clip_ratio_low)
    left_out = too_high | too_low
    return _truncated(log_probs, old_log_probs, advantages, response_mask, left_out, clip_ratio_c, rollout_is_weights)


def _truncated(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    left_out: Bool[Tensor, "B T"],
    largest_weight: float | None,
    rollout_is_weights: Tokens | None,
) -> TokenLoss:
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, response_mask)
    ratio = log_ratio.detach().exp()
    weight = ratio if largest_weight is None else ratio.clamp(max=largest_weight)
    loss = select(-weight * select(advantages, response_mask) * select(log_probs, response_mask), ~left_out)
    metrics = ratio_metrics(log_ratio, response_mask) | {
        "actor/pg_clipfrac": Mean.of(left_out, response_mask),
        "actor/pg_clipfrac_lower": Mean.of((weight < ratio) & ~left_out, response_mask),
    }
    return weighted(loss, response_mask, rollout_is_weights, metrics)
