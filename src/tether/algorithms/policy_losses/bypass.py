"""The loss that uses the sampler as the old policy and corrects for it in each update."""

from tether.algorithms.aggregation import Mean, Metric, TokenLoss, bounded_log_ratio, ratio_metrics, weighted
from tether.algorithms.masking import select
from tether.algorithms.policy_losses.clipped import vanilla
from tether.algorithms.registry import AboveOne, NonNegative, Positive
from tether.algorithms.rollout_correction import (
    RejectionBounds,
    importance_statistics,
    importance_weights,
    rejection_mask,
    veto_mask,
)
from tether.algorithms.shapes import Mask, Tokens


def bypass_mode(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    loss_type: str = "ppo_clip",
    rollout_is: str | None = None,
    rollout_is_threshold: Positive = 2.0,
    rollout_is_threshold_lower: Positive | None = None,
    rollout_rs: RejectionBounds | None = None,
    veto_threshold: Positive | None = None,
    clip_ratio_low: NonNegative = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    clip_ratio_c: AboveOne | None = 3.0,
) -> TokenLoss:
    """PPO without recomputed log-probs: old_log_probs are the sampler's (verl's bypass mode).

    ``ppo_clip``: `vanilla` around the sampler; its ratio already is the importance weight, so no other weight is
    applied. ``reinforce``: L = -w A log p with w the truncated importance weight of the current policy
    (`importance_weights`), 1 if rollout_is is None. Tokens or rows that rollout_rs (`rejection_mask`) or veto_threshold
    (`veto_mask`) rejects, comparing the current policy with the sampler, have loss 0 but stay in the denominators of
    the aggregation, which are fixed before the split. The weights of rollout_is are logged for both losses
    (`importance_statistics`).

    Assumes: the sampler's probabilities are exact enough to be the old policy.
    Use it: where the extra forward pass is expensive, and the sampler agrees with the trainer.
    Watch: `training/rollout_probs_diff_mean` and `actor/ppo_kl`, which now include the sampler's numerical error.
    Keys: `algorithm.rollout_correction.bypass_mode`, `algorithm.rollout_correction.loss_type`, and the other keys of
        rollout correction.

    Raises:
        ValueError: loss_type is unknown.
    """
    accepted = response_mask.bool()
    if rollout_rs is not None:
        accepted = rejection_mask(log_probs.detach(), old_log_probs, response_mask, rollout_rs)
    if veto_threshold is not None:
        accepted = accepted & veto_mask(log_probs.detach(), old_log_probs, response_mask, veto_threshold)
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, response_mask).detach()
    off_policy: dict[str, Metric] = {
        "actor/rejected": Mean.of(~accepted, response_mask),
        "rollout_corr/kl": Mean.of(-log_ratio, response_mask),
        "rollout_corr/k3_kl": Mean.of(log_ratio.expm1() - log_ratio, response_mask),
    }
    if rollout_is is not None:
        off_policy |= importance_statistics(
            log_probs.detach(),
            old_log_probs,
            response_mask,
            level=rollout_is,
            threshold=rollout_is_threshold,
            threshold_lower=rollout_is_threshold_lower,
        )
    if loss_type == "ppo_clip":
        clipped = vanilla(
            log_probs,
            old_log_probs,
            advantages,
            accepted,
            clip_ratio_low=clip_ratio_low,
            clip_ratio_high=clip_ratio_high,
            clip_ratio_c=clip_ratio_c,
        )
        return TokenLoss(clipped.loss, clipped.metrics | off_policy)
    if loss_type == "reinforce":
        weights = None
        if rollout_is is not None:
            weights = importance_weights(
                log_probs.detach(),
                old_log_probs,
                response_mask,
                level=rollout_is,
                threshold=rollout_is_threshold,
                threshold_lower=rollout_is_threshold_lower,
            )
        loss = -select(advantages, accepted) * select(log_probs, accepted)
        metrics = ratio_metrics(bounded_log_ratio(log_probs, old_log_probs, accepted), accepted)
        return weighted(loss, accepted, weights, metrics | off_policy)
    raise ValueError(f"bypass_mode: unknown loss_type {loss_type!r}. Use ppo_clip or reinforce")
