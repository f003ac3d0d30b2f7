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
"""Its exp() is finite in float32; policies further apart have no meaningful ratio."""


def bounded_log_ratio(log_probs: Tokens, old_log_probs: Tokens, response_mask: Mask) -> Tokens:
    """Return log p - log p_old, clamped to +-20; 0 outside the mask."""
    difference = select(log_probs, response_mask) - select(old_log_probs, response_mask)
    return clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class Mean:
    """A sum and a count: ``a + b`` is the mean over the values of both. Over ranks, sum both fields."""

    total: Scalar
    count: Scalar

    @classmethod
    def of(cls, values: Shaped[torch.Tensor, "..."], mask: Shaped[torch.Tensor, "..."]) -> Mean:
        """Sum the values of valid positions; booleans count as 0 and 1."""
        _same_shape("Mean.of", values, mask)
        wide = values.detach().to(torch.promote_types(values.dtype, torch.float32))
        return cls(masked_sum(wide, mask), mask.bool().sum().to(wide.dtype))

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def __float__(self) -> float:
        """Return the mean; 0 if there is no value."""
        return float(self.total / self.count.clamp(min=1))


@dataclass(frozen=True)
class Max:
    """A maximum: ``a + b`` is the larger one. Over ranks, reduce with max. The maximum of nothing is -inf."""

    value: Scalar

    @classmethod
    def of(cls, values: Shaped[torch.Tensor, "..."], mask: Shaped[torch.Tensor, "..."]) -> Max:
        """Return the largest valid value as a `Max`."""
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
        """Return the smallest valid value as a `Min`."""
        _same_shape("Min.of", values, mask)
        return cls(-largest(-values.detach(), mask))

    def __add__(self, other: Min) -> Min:
        return Min(torch.minimum(self.value, other.value))

    def __float__(self) -> float:
        return float(self.value)


Metric = Mean | Max | Min


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token, 0 outside the mask and not aggregated, with metrics."""

    loss: Tokens
    metrics: dict[str, Metric]
    """Metrics by verl's names; ``float(metric)`` is the number to log."""


def _same_shape(name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
    if values.shape != mask.shape:
        raise ValueError(f"{name}: mask has shape {list(mask.shape)}; expected {list(values.shape)}, as values")


def merge_metrics(pieces: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of micro-batches to those of the mini-batch."""
    merged: dict[str, Metric] = {}
    for metrics in pieces:
        for name, metric in metrics.items():
            merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
    return merged


def ratio_metrics(log_ratio: Tokens, response_mask: Mask) -> dict[str, Metric]:
    """Return metrics of the ratio before any clipping: mean, extremes, and its estimate of the KL to the old policy."""
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
    """Multiply the loss by the importance weights of the rollout, if any, and set it to 0 outside the mask."""
    loss = select(loss, response_mask)
    if rollout_is_weights is not None:
        loss = loss * select(rollout_is_weights, response_mask)
    return TokenLoss(loss, metrics)
