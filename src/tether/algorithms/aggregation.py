"""Aggregation of token losses to one number that does not depend on how the batch is split into micro-batches."""

from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from tether.algorithms.checks import NonNegative, Positive
from tether.algorithms.masking import masked_sum, select
from tether.algorithms.shapes import Mask, Scalar, Tokens

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
    """Return what a micro-batch contributes to the loss of its mini-batch.

    Assumes: ``token-mean`` gives every token the same weight, so long rows count more; ``seq-mean-token-mean`` gives
        every row the same weight, so tokens of long rows count less.
    Use it: ``token-mean`` by default (DAPO); ``seq-mean-token-mean`` for losses of entire rows (as in GRPO); the sums
        where length should not be normalised away (Dr. GRPO, arXiv 2503.20783).
    Watch: `response_length/mean`: growth without a better score can come from the weight of long rows.
        `actor/grad_norm`: sums have larger gradients.
    Keys: `actor_rollout_ref.actor.loss_agg_mode`, `actor_rollout_ref.actor.loss_scale_factor`, `critic.loss_agg_mode`.

    Args:
        loss: the loss of each token of the micro-batch, which may also be the shard of a rank or the full mini-batch.
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

    The denominators have no default on purpose: with those of one micro-batch, the gradient would depend on its size.
    A mini-batch without a token has loss 0. Under data parallelism sum the contributions; where gradients are averaged
    over ranks, multiply by the number of ranks.

    Raises:
        ValueError: an unknown mode, or one that ends in ``-norm`` without max_length.
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
    """Return the divisor of a row's sum of losses and that of the sum over rows, as defined by `aggregate_loss`.

    The weight of a token in the loss is 1 over the product of the two.

    Args:
        mode: one of `AGGREGATIONS`.
        row_tokens: tokens n_i of each row; one number if all rows have the same number.
        num_tokens: tokens in the full mini-batch.
        num_sequences: rows of the full mini-batch with at least one token.
        max_length: the divisor of the modes whose names end in ``-norm``.

    Raises:
        ValueError: an unknown mode, or one that ends in ``-norm`` without max_length.
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
    """Return what a micro-batch contributes to RLinf's episode-weighted mean: all episodes have the same weight.

    Assumes: an episode is one unit of experience, however long it took.
    Use it: for embodied tasks without automatic reset, where success ends an episode early.
    Watch: `actor/grad_norm`: episodes much shorter than L have weights far above 1.
    Keys: `actor_rollout_ref.actor.loss_agg_mode=masked_mean_ratio`, `actor_rollout_ref.actor.loss_scale_factor`.

    Args:
        loss: the loss of each step of the micro-batch.
        response_mask: the live steps of the micro-batch.
        episode_length: live steps n of the episode that each element belongs to, broadcast over T.
        max_episode_length: the length L that an episode of full weight has.
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
        episode_length: live steps n; an episode without one has the weight of an episode with one step, and no loss.
        max_episode_length: the length L of an episode of weight 1.
    """
    return max_episode_length / episode_length.clamp(min=1)


def _at_least_one(count: Shaped[Tensor, "..."] | float) -> Any:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
