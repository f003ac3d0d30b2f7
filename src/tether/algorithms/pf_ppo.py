"""Policy-filtration PPO: train on the answers with the most reliable reward (Shen and Zhang 2024, arXiv 2409.06957)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tether.algorithms.registry import Positive
from tether.algorithms.reward_shaping import check_finite
from tether.algorithms.shapes import Rows

REWEIGHT_METHODS = ("pow", "max_min", "max_random")


def pf_ppo_indices(
    scores: Rows,
    valid: Bool[Tensor, " B"],
    *,
    reweight_method: str,
    weight_pow: Positive = 2.0,
    generator: torch.Generator,
) -> Int[Tensor, " B"]:
    """Draw B rows with replacement, preferring rows with extreme rewards.

    Row i is drawn with probability w_i / sum_j w_j, where w = |s|^weight_pow + 1e-8 (``pow``), or depends on the best
    and worst score.

    Assumes: a reward model is most reliable for its extreme rewards.
    Use it: with a learned reward and several answers to each prompt.
    Watch: `critic/score/mean` compared with the validation score: the resampled batch does not represent the policy.
    Keys: `algorithm.use_pf_ppo`, `algorithm.pf_ppo.reweight_method`, `algorithm.pf_ppo.weight_pow`.

    Args:
        scores: score of each row, before any KL penalty.
        valid: rows that may be drawn: those with a score, at least one.
        reweight_method: ``pow``: weight |score|^weight_pow. ``max_min``: 1 for rows with the batch's best or worst
            score, else 0. ``max_random``: 0.4 for the best, 0.1 for the others. 1e-8 is added to every weight.
        weight_pow: the exponent of ``pow``.
        generator: random generator of the draw, on the CPU.

    Returns:
        Row indices, to be applied to every tensor of the batch after advantages are computed.

    Raises:
        ValueError: reweight_method is unknown, no row is valid, or a valid score is not finite.
    """
    device = scores.device
    scores, valid = scores.cpu(), valid.cpu()
    if not len(scores):
        return valid.nonzero()[:, 0].to(device)
    if not valid.any():
        raise ValueError(f"valid: none of {len(scores)} rows may be drawn")
    check_finite(scores[valid])
    best, worst = scores[valid].max(), scores[valid].min()
    weights: Float[Tensor, " B"]
    match reweight_method:
        case "pow":
            weights = scores.abs().pow(weight_pow)
        case "max_min":
            weights = ((scores == best) | (scores == worst)).to(scores.dtype)
        case "max_random":
            weights = torch.where(scores == best, 0.4, 0.1).to(scores.dtype)
        case _:
            methods = ", ".join(REWEIGHT_METHODS)
            raise ValueError(f"pf_ppo.reweight_method: unknown {reweight_method!r}. Use one of: {methods}")
    weights = torch.where(valid, weights + 1e-8, 0.0)
    return torch.multinomial(weights, scores.numel(), replacement=True, generator=generator).to(device)
