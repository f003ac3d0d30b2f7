"""The importance ratio, and the result of a loss: one number for each token, and metrics that add up exactly over
micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Shaped

from tether.algorithms.masking import clip, largest, masked_sum, select
from tether.algorithms.shapes import Mask, Scalar, Tokens

MAX_LOG_RATIO = 20.0
"""exp() of it is finite in float32; policies further apart have no meaningful ratio."""


def bounded_log_ratio(log_probs: Tokens, old_log_probs: Tokens, response_mask: Mask) -> Tokens:
    """Return log p - log p_old within +-20; 0 outside the mask."""
    difference = select(log_probs, response_mask) - select(old_log_probs, response_mask)
    return clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class Mean:
    """A mean that is not divided yet: ``a + b`` is the mean over both pieces. Over ranks, sum both fields."""

    total: Scalar
    count: Scalar

    @classmethod
    def of(cls, values: Shaped[torch.Tensor, "..."], mask: Shaped[torch.Tensor, "..."]) -> Mean:
        """Collect a value for each valid position; booleans count as 0 and 1."""
        _same_shape("Mean.of", values, mask)
        wide = values.detach().to(torch.promote_types(values.dtype, torch.float32))
        return cls(masked_sum(wide, mask), mask.bool().sum().to(wide.dtype))

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def __float__(self) -> float:
        """Divide; the mean of nothing is 0."""
        return float(self.total / self.count.clamp(min=1))


@dataclass(frozen=True)
class Max:
    """A maximum: ``a + b`` is the larger one. Over ranks, reduce with max. The maximum of nothing is -inf."""

    value: Scalar

    @classmethod
    def of(cls, values: Shaped[torch.Tensor, "..."], mask: Shaped[torch.Tensor, "..."]) -> Max:
        """Take the largest valid value."""
        _same_shape("Max.of", values, mask)
        return cls(largest(values.detach(), mask))

    def __add__(self, other: Max) -> Max:
        return Max(torch.maximum(self.value, other.value))

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Min:
    """A minimum: ``a + b`` is the smaller one. Over ranks, reduce with min. The minimum of nothing is inf."""

    value: Scalar

    @classmethod
    def of(cls, values: Shaped[torch.Tensor, "..."], mask: Shaped[torch.Tensor, "..."]) -> Min:
        """Take the smallest valid value."""
        _same_shape("Min.of", values, mask)
        return cls(-largest(-values.detach(), mask))

    def __add__(self, other: Min) -> Min:
        return Min(torch.minimum(self.value, other.value))

    def __float__(self) -> float:
        return float(self.value)


Metric = Mean | Max | Min


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token, 0 outside the mask, still to be aggregated; and what to log about it."""

    loss: Tokens
    metrics: dict[str, Metric]
    """By name, as verl names them; ``float(metric)`` is the number to log."""


def _same_shape(name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
    if values.shape != mask.shape:
        raise ValueError(f"{name}: mask has shape {list(mask.shape)}; expected {list(values.shape)}, as values")


def merge_metrics(pieces: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Add the metrics of micro-batches: the result is that of the whole mini-batch."""
    merged: dict[str, Metric] = {}
    for piece in pieces:
        for name, metric in piece.items():
            merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
    return merged


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
