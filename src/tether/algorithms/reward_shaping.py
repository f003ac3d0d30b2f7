"""Transformations of row scores, applied before rewards are computed from them."""

import math

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from tether.algorithms.masking import masked_whiten, select
from tether.algorithms.registry import NonNegative, PositiveInt, checked
from tether.algorithms.shapes import Rows


def overlong_penalty(
    response_length: Shaped[Tensor, " B"],
    *,
    max_length: PositiveInt,
    buffer_length: PositiveInt,
    penalty_factor: NonNegative = 1.0,
) -> Rows:
    """Soft penalty for long responses, to be added to the score (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 13).

    P = -penalty_factor max(0, n - (max_length - buffer_length)) / buffer_length for n tokens: 0 up to the buffer, then
    falling linearly to -penalty_factor at max_length.

    Assumes: a truncated answer is worth less than one that ended, and the penalty should increase gradually.
    Use it: where many answers reach the length limit.
    Watch: `response_length/clip_ratio` and `reward/overlong_fraction`: they should fall.
    Keys: `reward_model.overlong_buffer.enable`, `reward_model.overlong_buffer.len`,
        `reward_model.overlong_buffer.penalty_factor`.
    """
    if buffer_length > max_length:
        raise ValueError(f"buffer_length is {buffer_length}; expected a whole number from 1 to max_length={max_length}")
    excess = (response_length - (max_length - buffer_length)).to(torch.float32)
    return -(excess / buffer_length * penalty_factor).clamp(min=0.0)


def normalize_rewards_per_batch(scores: Rows, valid: Bool[Tensor, " B"]) -> Rows:
    """Normalise the valid scores of this batch to mean 0 and variance 1; 0 for all others.

    s' = (s - mean) / sqrt(var + 1e-8), with the unbiased variance.

    Assumes: the batch is large enough for a mean and a std.
    Use it: with `gae`, where the critic would otherwise have to learn the scale of the rewards first.
    Watch: `critic/vf_loss`, `critic/rewards/max`.
    Keys: `algorithm.normalize_rewards=batch`.
    """
    return masked_whiten(scores, valid)


def check_finite(scores: Rows) -> None:
    """Raise ValueError unless the scores of valid rows, on the CPU, are finite."""
    wrong = scores[~scores.isfinite()]
    if wrong.numel():
        raise ValueError(f"scores: {wrong[0].item()} in a valid row; expected finite numbers")


class RunningRewardNormalizer:
    """Normalises scores by the running mean and variance of all scores so far.

    Batches are merged by the update of Chan et al. (1979), which avoids cancellation. The scale is 1 while there are
    fewer than two scores or all are equal.

    Assumes: the scale of the scores changes slowly.
    Use it: like `normalize_rewards_per_batch`, where batches are small or targets must not vary with the batch.
    Watch: `reward/running_std`, `critic/vf_explained_var`.
    Keys: `algorithm.normalize_rewards=running`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0  # sum of squared deviations from the mean

    @checked
    def update(self, scores: Rows, valid: Bool[Tensor, " B"]) -> None:
        """Add the valid scores to the statistics.

        Raises:
            ValueError: a valid score is not finite; it would make the statistics useless for the rest of the run.
        """
        new = scores[valid].cpu().double()
        if new.numel() == 0:
            return
        check_finite(new)
        total = self.count + new.numel()
        shift = float(new.mean()) - self.mean
        self.squares += float((new - new.mean()).square().sum()) + shift**2 * self.count * new.numel() / total
        self.mean += shift * new.numel() / total
        self.count = total

    @checked
    @torch.no_grad()
    def normalize(self, scores: Rows, valid: Bool[Tensor, " B"]) -> Rows:
        """Return (score - mean) / std for the valid scores and 0 for the others, without updating the statistics."""
        return select((select(scores, valid) - self.mean) / (self.std or 1.0), valid)

    @property
    def std(self) -> float:
        """Return the unbiased standard deviation of all scores so far; 0 for fewer than two."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def state_dict(self) -> dict[str, float]:
        """Return the state, which `load_state_dict` restores exactly."""
        return {"count": float(self.count), "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load a saved state."""
        self.count, self.mean, self.squares = int(state["count"]), state["mean"], state["squares"]
