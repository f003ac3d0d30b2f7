"""Selection of the tokens that some losses treat differently, once over a mini-batch before it is split.

`select_clip_cov` and `select_kl_cov` rank tokens by their effect on the entropy, the token's covariance: the product of
the deviations of advantage and log-probability from their means over the mini-batch.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from tether.algorithms.aggregation import bounded_log_ratio
from tether.algorithms.masking import masked_mean, select
from tether.algorithms.registry import Fraction, NonNegative
from tether.algorithms.shapes import Mask, Tokens


@torch.no_grad()
def select_clip_cov(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    generator: torch.Generator,
    clip_cov_ratio: Fraction = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    clip_ratio_low: NonNegative = 0.2,
    clip_ratio_high: NonNegative = 0.2,
) -> Bool[Tensor, "B T"]:
    """Draw tokens with a covariance strictly between the bounds, among those that PPO's clip does not exclude.

    Args:
        log_probs: log-probs of the current policy, over the full mini-batch.
        old_log_probs: log-probs of the policy before the update.
        advantages: advantage of each token.
        response_mask: the policy's tokens.
        generator: random generator, on the CPU; the same state and row order give the same tokens.
        clip_cov_ratio: fraction of the mini-batch's tokens to draw (at least one token, at most the candidates).
        clip_cov_lb: lower bound of the covariance.
        clip_cov_ub: upper bound of the covariance.
        clip_ratio_low: the lower clip range of the loss.
        clip_ratio_high: the upper clip range of the loss.
    """
    mask = response_mask.bool()
    covariance = _covariance(log_probs, advantages, mask)
    ratio = bounded_log_ratio(log_probs, old_log_probs, mask).exp()
    advantages = select(advantages, mask)
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) > -advantages * ratio
    candidates = (mask & ~clipped & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)).flatten().nonzero()[:, 0]
    count = max(int(clip_cov_ratio * int(mask.sum())), 1)
    drawn = torch.randperm(candidates.numel(), generator=generator)[:count].to(candidates.device)
    return _mask_of(candidates[drawn], mask)


@torch.no_grad()
def select_kl_cov(
    log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, response_mask: Mask, *, kl_cov_ratio: Fraction = 2e-4
) -> Bool[Tensor, "B T"]:
    """Select the tokens with the largest covariance: the fraction kl_cov_ratio of the mini-batch, at least one."""
    mask = response_mask.bool()
    tokens = int(mask.sum())
    covariance = torch.where(mask, _covariance(log_probs, advantages, mask), -torch.inf).flatten()
    count = min(max(int(kl_cov_ratio * tokens), 1), tokens)
    return _mask_of(covariance.topk(count).indices, mask)


@torch.no_grad()
def select_m2po(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    response_mask: Mask,
    *,
    m2_threshold: NonNegative = 0.04,
) -> Bool[Tensor, "B T"]:
    """Select the tokens with the largest (log r)^2: the fewest whose exclusion brings the mean down to m2_threshold.

    Only tokens that the update would move further from the old policy count, those with A log r > 0, which `vanilla`
    might clip. (AReaL counts all tokens.)
    """
    mask = response_mask.bool()
    log_ratio = bounded_log_ratio(log_probs, old_log_probs, mask)
    candidates = (select(advantages, mask) * log_ratio > 0).flatten().nonzero()[:, 0]
    squares, order = log_ratio.flatten()[candidates].double().square().sort(stable=True)
    means = squares.cumsum(dim=0) / torch.arange(1, squares.numel() + 1, device=squares.device)
    return _mask_of(candidates[order[means > m2_threshold]], mask)


def _covariance(log_probs: Tokens, advantages: Tokens, mask: Bool[Tensor, "B T"]) -> Tokens:
    deviations = (select(x, mask) - masked_mean(x, mask) for x in (advantages, log_probs))
    return next(deviations) * next(deviations)


def _mask_of(indices: Tensor, mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    return torch.zeros_like(mask.flatten()).index_fill(0, indices, True).view(mask.shape)
