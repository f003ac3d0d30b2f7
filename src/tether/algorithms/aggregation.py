"""Aggregation of token losses into one number that does not depend on the split into micro-batches.

A policy loss returns one number for each token, and metrics that add up exactly over micro-batches and ranks
(`TokenLoss`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from tether.algorithms.masking import clip, largest, masked_sum, select
from tether.algorithms.registry import NonNegative, Positive
from tether.algorithms.shapes import Mask, Scalar, Tokens

MAX_LOG_RATIO = 20.0
"""Bound of log ratios, whose exp() is finite in float32; policies further apart have no meaningful ratio."""


def bounded_log_ratio(log_probs: Tokens, old_log_probs: Tokens, response_mask: Mask) -> Tokens:
    """Return log p - log p_old, clamped to +-20; 0 outside the mask."""
    difference = select(log_probs, response_mask) - select(old_log_probs, response_mask)
    return clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class Mean:
    """A sum and a count; ``a + b`` combines both. To reduce over ranks, sum both fields."""

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
    """A maximum; ``a + b`` is the larger one. To reduce over ranks, use max. The maximum of no values is -inf."""

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
    """A minimum; ``a + b`` is the smaller one. To reduce over ranks, use min. The minimum of no values is inf."""

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
    """The loss of each token, 0 outside the mask and not yet aggregated, with metrics."""

    loss: Tokens
    metrics: dict[str, Metric]
    """Metrics by verl's names; ``float(metric)`` is the value to log."""


def _same_shape(name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
    if values.shape != mask.shape:
        raise ValueError(f"{name}: mask has shape {list(mask.shape)}; expected {list(values.shape)}, as values")


def merge_metrics(pieces: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of micro-batches into those of the mini-batch."""
    merged: dict[str, Metric] = {}
    for metrics in pieces:
        for name, metric in metrics.items():
            merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
    return merged


def ratio_metrics(log_ratio: Tokens, response_mask: Mask) -> dict[str, Metric]:
    """Return metrics of the ratio before clipping: mean, extremes, and its estimates of the KL from the old policy."""
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


AGGREGATIONS = (
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum-norm"
)  # fmt: skip

Count = NonNegative | Shaped[Tensor, ""]


def aggregate_loss(
    loss: Tokens,
    response_mask: Mask,
    mode: str,
    *,
    num_tokens: Count,
    num_sequences: Count,
    max_length: Positive | Shaped[Tensor, ""] | None = None,
) -> Scalar:
    """Return a micro-batch's contribution to the loss of its mini-batch.

    Assumes: ``token-mean`` gives every token the same weight, so long rows count more; ``seq-mean-token-mean`` gives
        every row the same weight, so tokens of long rows count less.
    Use it: ``token-mean`` by default (DAPO); ``seq-mean-token-mean`` for losses per row (as in GRPO); the modes with a
        token sum where length should not be normalised away (Dr. GRPO, arXiv 2503.20783).
    Watch: `response_length/mean`: growth without a better score can result from the weight of long rows.
        `actor/grad_norm`: modes with a token sum have larger gradients.
    Keys: `actor_rollout_ref.actor.loss_agg_mode`, `actor_rollout_ref.actor.loss_scale_factor`, `critic.loss_agg_mode`.

    Args:
        loss: the loss of each token of the micro-batch; a rank's shard or the full mini-batch work too.
        response_mask: the valid tokens of the micro-batch.
        mode: one of `AGGREGATIONS`.
        num_tokens: tokens in the full mini-batch, over all micro-batches and ranks (`count_valid`).
        num_sequences: rows of the full mini-batch with at least one token.
        max_length: the divisor of the two modes whose names end in ``-norm``, required for them and unused otherwise.

    With s_i the sum of row i over its tokens and n_i their number, the contributions add up to L:

    - ``token-mean``: L = sum_i s_i / num_tokens
    - ``seq-mean-token-sum``: L = sum_i s_i / num_sequences
    - ``seq-mean-token-mean``: L = sum_i (s_i / n_i) / num_sequences
    - ``seq-mean-token-sum-norm``: L = sum_i (s_i / max_length) / num_sequences
    - ``token-sum-norm``: L = sum_i s_i / max_length, so its gradient grows with the mini-batch. verl computed this as
      ``seq-mean-token-sum-norm`` until February 2026.

    The denominators have no default on purpose: if they were counted in one micro-batch, the gradient would depend on
    the split. A mini-batch without a token has loss 0. With data parallelism, sum the contributions over ranks; if
    gradients are averaged over ranks, multiply by the number of ranks.

    Raises:
        ValueError: the mode is unknown, or ends in ``-norm`` and max_length is None.
    """
    row_tokens = response_mask.bool().sum(dim=-1)
    row_divisor, total_divisor = loss_divisors(
        mode, row_tokens, num_tokens=num_tokens, num_sequences=num_sequences, max_length=max_length
    )
    return (masked_sum(loss, response_mask, dim=-1) / row_divisor).sum() / total_divisor


def loss_divisors(
    mode: str,
    row_tokens: Shaped[Tensor, "..."] | float,
    *,
    num_tokens: Count,
    num_sequences: Count,
    max_length: Positive | Shaped[Tensor, ""] | None,
) -> tuple[Shaped[Tensor, "..."] | float, Positive | Shaped[Tensor, ""]]:
    """Return the divisors of each row's sum and of the sum over rows, as defined by `aggregate_loss`.

    A token's weight in the loss is 1 / (product of both divisors).

    Args:
        mode: one of `AGGREGATIONS`.
        row_tokens: tokens n_i of each row; one number if it is the same for all rows.
        num_tokens: tokens in the full mini-batch.
        num_sequences: rows of the full mini-batch with at least one token.
        max_length: the divisor of the modes whose names end in ``-norm``.

    Raises:
        ValueError: the mode is unknown, or ends in ``-norm`` and max_length is None.
    """
    match mode:
        case "token-mean":
            return 1, _at_least_one(num_tokens)
        case "seq-mean-token-sum":
            return 1, _at_least_one(num_sequences)
        case "seq-mean-token-mean":
            return _at_least_one(row_tokens), _at_least_one(num_sequences)
        case "seq-mean-token-sum-norm" | "token-sum-norm":
            if max_length is None:
                raise ValueError(f"{mode} needs max_length: the response width, or loss_scale_factor")
            return max_length, 1 if mode == "token-sum-norm" else _at_least_one(num_sequences)
    raise ValueError(f"unknown aggregation {mode!r}. Use one of: {', '.join(AGGREGATIONS)}")


def masked_mean_ratio(
    loss: Tokens,
    response_mask: Mask,
    *,
    episode_length: Shaped[Tensor, " B #T"],
    max_episode_length: Positive | Shaped[Tensor, ""],
    num_elements: Count,
) -> Scalar:
    """Return a micro-batch's contribution to RLinf's episode-weighted mean, in which all episodes have the same weight.

    Assumes: an episode is one unit of experience, whatever its length.
    Use it: for embodied tasks without automatic reset, where success ends an episode early.
    Watch: `actor/grad_norm`: episodes much shorter than L have weights far above 1.
    Keys: `actor_rollout_ref.actor.loss_agg_mode=masked_mean_ratio`, `actor_rollout_ref.actor.loss_scale_factor`.

    Args:
        loss: the loss of each step of the micro-batch.
        response_mask: the live steps of the micro-batch.
        episode_length: live steps n of the episode that each element belongs to, broadcast over T.
        max_episode_length: the length L at which an episode's steps have weight 1.
        num_elements: number of elements of ``loss`` in the full mini-batch, including masked ones.

    The contributions add up to 1 / num_elements times the sum of w * loss over live steps, with w = L / n.
    """
    weight = episode_weights(episode_length.to(torch.promote_types(loss.dtype, torch.float32)), max_episode_length)
    return (select(loss, response_mask) * weight).sum() / _at_least_one(num_elements)


def episode_weights(
    episode_length: Shaped[Tensor, "..."], max_episode_length: Positive | Shaped[Tensor, ""]
) -> Shaped[Tensor, "..."]:
    """Return the weight L / n of the steps of each episode, as used by `masked_mean_ratio`.

    Args:
        episode_length: live steps n; an episode without one gets the weight of one with a single step, and has no loss.
        max_episode_length: the length L of an episode of weight 1.
    """
    return max_episode_length / episode_length.clamp(min=1)


def _at_least_one(count: Shaped[Tensor, "..."] | float) -> Any:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
