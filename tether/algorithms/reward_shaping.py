"""Changes to the scores of rows before anything else sees them."""

import math

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from tether.algorithms.masking import masked_whiten, select
from tether.algorithms.shapes import Rows


def overlong_penalty(
    response_length: Shaped[Tensor, " B"], *, max_length: int, buffer_length: int, penalty_factor: float = 1.0
) -> Rows:
    """Soft punishment of long responses, to be added to the score (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 13).

    0 up to max_length - buffer_length tokens, then falling linearly to -penalty_factor at max_length.
    """
    excess = (response_length - (max_length - buffer_length)).to(torch.float32)
    return -(excess / buffer_length * penalty_factor).clamp(min=0.0)


def normalize_rewards_per_batch(scores: Rows, valid: Bool[Tensor, " B"]) -> Rows:
    """Bring the valid scores of this batch to mean 0 and variance 1; 0 for the others."""
    return masked_whiten(scores, valid)


class RunningRewardNormalizer:
    """Mean and variance of all scores so far, and scores measured by them.

    Batches are merged by the update of Chan et al. (1979), which has no cancellation. Until there are two scores, and
    while all are equal, the scale is 1.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0  # sum of squared deviations from the mean

    def update(self, scores: Rows, valid: Bool[Tensor, " B"]) -> None:
        """Take the valid scores in."""
        new = scores[valid].cpu().double()
        if new.numel() == 0:
            return
        total = self.count + new.numel()
        shift = float(new.mean()) - self.mean
        self.squares += float((new - new.mean()).square().sum()) + shift**2 * self.count * new.numel() / total
        self.mean += shift * new.numel() / total
        self.count = total

    def normalize(self, scores: Rows, valid: Bool[Tensor, " B"]) -> Rows:
        """Return (score - mean) / std for the valid scores, 0 for the others; changes no statistic."""
        return select((select(scores, valid) - self.mean) / (self.std or 1.0), valid)

    @property
    def std(self) -> float:
        """Unbiased standard deviation of all scores so far; 0 for fewer than two."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def state_dict(self) -> dict[str, float]:
        """Return what `load_state_dict` restores exactly."""
        return {"count": float(self.count), "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved state."""
        self.count, self.mean, self.squares = int(state["count"]), state["mean"], state["squares"]
