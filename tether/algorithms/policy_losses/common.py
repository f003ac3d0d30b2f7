"""What the policy losses share: the importance ratio, its metrics, and the end of every loss."""

from tether.algorithms.masking import select
from tether.algorithms.shapes import Mask, Tokens
from tether.algorithms.token_loss import Max, Mean, Metric, Min, TokenLoss

MAX_LOG_RATIO = 20.0
"""exp() of it is finite in float32; a policy that moved further has no meaningful ratio."""


def bounded_log_ratio(log_probs: Tokens, old_log_probs: Tokens, response_mask: Mask) -> Tokens:
    """Return log p - log p_old within +-20; 0 outside the mask."""
    difference = select(log_probs, response_mask) - select(old_log_probs, response_mask)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_metrics(log_ratio: Tokens, response_mask: Mask) -> dict[str, Metric]:
    """Describe the ratio before any clipping: its mean, extremes, and the KL to the old policy that it estimates."""
    ratio = log_ratio.detach().exp()
    return {
        "actor/ppo_kl": Mean.of(-log_ratio, response_mask),
        "actor/ratio_mean": Mean.of(ratio, response_mask),
        "actor/ratio_max": Max.of(ratio, response_mask),
        "actor/ratio_min": Min.of(ratio, response_mask),
    }


def weighted(
    loss: Tokens, response_mask: Mask, rollout_is_weights: Tokens | None, metrics: dict[str, Metric]
) -> TokenLoss:
    """Multiply by the importance weights of the rollout, if there are any, and put 0 outside the mask."""
    loss = select(loss, response_mask)
    if rollout_is_weights is not None:
        loss = loss * select(rollout_is_weights, response_mask)
    return TokenLoss(loss, metrics)
