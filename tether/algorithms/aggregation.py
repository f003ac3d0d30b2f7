"""From a loss for each token to one number, the same number however the batch was cut into pieces."""

import torch
from jaxtyping import Shaped
from torch import Tensor

from tether.algorithms.checks import NonNegative, Positive
from tether.algorithms.masking import masked_sum, select
from tether.algorithms.shapes import Mask, Scalar, Tokens

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

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
    """Return this piece's share of the loss of a whole mini-batch.

    Assumes: ``token-mean`` weighs tokens alike, so long rows more; ``seq-mean-token-mean`` weighs rows alike, so the
        tokens of long ones less.
    Use it: ``token-mean`` as a rule (DAPO); ``seq-mean-token-mean`` for losses of whole rows (GRPO's own); the sums
        where length should not be normalised away (Dr. GRPO, arXiv 2503.20783).
    Watch: `response_length/mean`: growth without a better score can come from the weight of long rows.
        `actor/grad_norm`: sums have larger gradients.
    Keys: `actor_rollout_ref.actor.loss_agg_mode`, `actor_rollout_ref.actor.loss_scale_factor`, `critic.loss_agg_mode`.

    Args:
        loss: the loss of each token of this piece (a micro-batch, a rank's part, or everything).
        response_mask: its tokens.
        mode: one of `AGGREGATIONS`.
        num_tokens: tokens in the whole mini-batch, all pieces and ranks together (`count_valid`).
        num_sequences: rows of the whole mini-batch with at least one token.
        max_length: the divisor of ``seq-mean-token-sum-norm``, required for it and unused otherwise.

    With s_i the sum of row i over its tokens and n_i their number, the shares add up to L:

    - ``token-mean``: L = sum_i s_i / num_tokens
    - ``seq-mean-token-sum``: L = sum_i s_i / num_sequences
    - ``seq-mean-token-mean``: L = sum_i (s_i / n_i) / num_sequences
    - ``seq-mean-token-sum-norm``: L = sum_i s_i / max_length. In spite of its name this mode does not divide by the
      number of sequences, as in verl of January 2026, so its gradient grows with the mini-batch.

    The denominators have no default on purpose: those of one piece would make the gradient depend on its size. A
    mini-batch without a token has loss 0. Under data parallelism sum the shares; where gradients are averaged over
    ranks, multiply by the number of ranks.

    Raises:
        ValueError: an unknown mode, or ``seq-mean-token-sum-norm`` without max_length.
    """
    row_sum = masked_sum(loss, response_mask, dim=-1)
    match mode:
        case "token-mean":
            return row_sum.sum() / _at_least_one(num_tokens)
        case "seq-mean-token-sum":
            return row_sum.sum() / _at_least_one(num_sequences)
        case "seq-mean-token-mean":
            row_mean = row_sum / response_mask.bool().sum(dim=-1).clamp(min=1)
            return row_mean.sum() / _at_least_one(num_sequences)
        case "seq-mean-token-sum-norm":
            if max_length is None:
                raise ValueError("seq-mean-token-sum-norm needs max_length: the response width, or loss_scale_factor")
            return row_sum.sum() / max_length
    raise ValueError(f"unknown aggregation {mode!r}. Use one of: {', '.join(AGGREGATIONS)}")


def masked_mean_ratio(
    loss: Tokens,
    response_mask: Mask,
    *,
    episode_length: Shaped[Tensor, " B #T"],
    max_episode_length: Positive | Shaped[Tensor, ""],
    num_elements: Count,
) -> Scalar:
    """Return this piece's share of RLinf's episode-weighted mean: every episode weighs the same, short or long.

    Assumes: an episode is one unit of experience, however long it took.
    Use it: for embodied tasks without automatic reset, where success ends an episode early.
    Watch: `actor/grad_norm`: episodes much shorter than L have weights far above 1.
    Keys: `actor_rollout_ref.actor.loss_agg_mode=masked_mean_ratio`, `actor_rollout_ref.actor.loss_scale_factor`.

    Args:
        loss: the loss of each step of this piece.
        response_mask: its live steps.
        episode_length: live steps n of the episode that each element belongs to, broadcast over T.
        max_episode_length: the length L that an episode of full weight has.
        num_elements: number of elements of ``loss`` in the whole mini-batch, masked ones too.

    The shares add up to 1 / num_elements times the sum of w * loss over live steps, with w = L / n.
    """
    # Dead rows have length 0; their loss is selected away, and must not become 0 / 0.
    weight = max_episode_length / episode_length.clamp(min=1).to(torch.promote_types(loss.dtype, torch.float32))
    return (select(loss, response_mask) * weight).sum() / _at_least_one(num_elements)


def _at_least_one(count: Count) -> Count:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
