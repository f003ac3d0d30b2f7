"""What the policy losses share: the metrics of the importance ratio, and the end of every loss."""

from tether.algorithms.masking import select
from tether.algorithms.shapes import Mask, Tokens
from tether.algorithms.token_loss import Max, Mean, Metric, Min, TokenLoss


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
