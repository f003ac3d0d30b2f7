"""Optimal token baselines, which minimise the gradient's variance at each position of a group.

The variance that a token adds to the gradient grows with the squared norm of the row's score function up to that token.
With respect to the logits, a token's score function has the squared norm 1 - 2 p_t + sum_v p_v^2, where p_t is the
probability of the sampled token and the sum runs over the vocabulary. Its running sum is the weight of a row in the
group's baseline.
"""

import torch

from tether.algorithms.advantages.gae import discounted_returns
from tether.algorithms.advantages.groups import Groups
from tether.algorithms.advantages.result import Advantages
from tether.algorithms.masking import select
from tether.algorithms.shapes import GroupIds, Mask, Tokens


def optimal_token_baseline(
    token_level_rewards: Tokens,
    response_mask: Mask,
    *,
    uid: GroupIds,
    old_log_probs: Tokens,
    sum_pi_squared: Tokens,
    rollout_is_weights: Tokens | None = None,
    handle_zero_tail: bool = True,
) -> Advantages:
    """Return of each token minus the weighted mean return of the group at the same position (verl's OTB).

    With G the undiscounted return and W the running sum of w = (1 - 2 p + sum_v p_v^2) rho^2 over the row's tokens,
    A_t = G_t - sum_i G_it W_it / (sum_i W_it + 1e-8), over the rows i of the group that have a token at t. A group of
    one has baseline 0.

    Assumes: a row whose tokens so far were uncertain adds more variance from here on; rows are compared by position.
    Use it: without a critic, on long answers of one turn, where a baseline per position is worth its cost.
    Watch: `actor/grad_norm`: its spread should be below that of `rloo`. `actor/sum_pi_squared`.
    Keys: `algorithm.adv_estimator=optimal_token_baseline`, `actor_rollout_ref.actor.calculate_sum_pi_squared`,
        `actor_rollout_ref.rollout.n`.

    Args:
        token_level_rewards: reward of each token.
        response_mask: the policy's tokens.
        uid: prompt group of each row.
        old_log_probs: log p of each sampled token.
        sum_pi_squared: sum_v p_v^2 at each position (`sum_pi_squared`).
        rollout_is_weights: rho, if the rollout is corrected by importance weights.
        handle_zero_tail: use baseline 0 at positions where only one row of the group has a token, so that its
            advantage is its return. With False, verl's default until February 2026, the row is its own baseline, and
            its advantage is 0.
    """
    groups = Groups.of(uid, response_mask)
    returns = discounted_returns(token_level_rewards, response_mask, gamma=1.0)
    size = 1 - 2 * select(old_log_probs, response_mask).exp() + select(sum_pi_squared, response_mask)
    if rollout_is_weights is not None:
        size = size * select(rollout_is_weights, response_mask).square()
    weight = select(select(size, response_mask).cumsum(dim=-1), response_mask)
    baseline = groups.sum(returns * weight) / (groups.sum(weight) + 1e-8)
    row_count = groups.sum(select(torch.ones_like(returns), response_mask))
    has_baseline = row_count > 1 if handle_zero_tail else (groups.size() > 1)[:, None]
    return Advantages(select(returns - torch.where(has_baseline, baseline, 0.0), response_mask), returns)


def tir_optimal_token_baseline(
    token_level_rewards: Tokens,
    response_mask: Mask,
    *,
    uid: GroupIds,
    old_log_probs: Tokens,
    sum_pi_squared: Tokens,
    rollout_is_weights: Tokens | None = None,
    handle_zero_tail: bool = True,
) -> Advantages:
    """`optimal_token_baseline` that compares the n-th policy tokens of the rows, not those at the same position.

    A_n = G_n - sum_i G_in W_in / (sum_i W_in + 1e-8) for the n-th policy token of a row, with G, W and the arguments of
    `optimal_token_baseline`. It is meant for tool-integrated reasoning (verl's TIR): observations between the actions
    are removed first, so that they do not shift positions.

    Assumes: the n-th token that the policy wrote is comparable between rows, whatever tool outputs are in between.
    Use it: like `optimal_token_baseline`, for answers of several turns.
    Watch: `actor/grad_norm`: its spread should be below that of `rloo`. `actor/sum_pi_squared`.
    Keys: `algorithm.adv_estimator=tir_optimal_token_baseline`, `actor_rollout_ref.actor.calculate_sum_pi_squared`,
        `actor_rollout_ref.rollout.n`.
    """
    mask = response_mask.bool()
    order = torch.argsort((~mask).int(), dim=-1, stable=True)

    def compact(tokens: Tokens) -> Tokens:
        return tokens.gather(-1, order)

    compacted = optimal_token_baseline(
        compact(token_level_rewards),
        mask.gather(-1, order),
        uid=uid,
        old_log_probs=compact(old_log_probs),
        sum_pi_squared=compact(sum_pi_squared),
        rollout_is_weights=None if rollout_is_weights is None else compact(rollout_is_weights),
        handle_zero_tail=handle_zero_tail,
    )
    advantages = torch.zeros_like(compacted.advantages).scatter(-1, order, compacted.advantages)
    return Advantages(advantages, torch.zeros_like(compacted.returns).scatter(-1, order, compacted.returns))
