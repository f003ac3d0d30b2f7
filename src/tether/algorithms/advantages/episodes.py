"""Generalised advantage estimation for rows that hold many consecutive episodes, as simulators return them."""

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algorithms.advantages.result import Advantages
from tether.algorithms.checks import Fraction
from tether.algorithms.masking import select, widen
from tether.algorithms.shapes import Mask, Rows, Tokens


@torch.no_grad()
def episodic_gae(
    rewards: Tokens,
    values: Tokens,
    next_values: Tokens,
    ends: Mask,
    valid: Mask,
    *,
    gamma: Fraction,
    lam: Fraction | Rows,
) -> Advantages:
    """Estimate the advantages of every episode of every row, not whitened (Schulman et al. 2016, arXiv 1506.02438).

    d_t = r_t + gamma V'_t - V_t and A_t = d_t + gamma lam A_{t+1} up to the end of the episode, where t + 1 is the next
    valid step; returns are A + V. `gae` is the case of one episode per row.

    Args:
        rewards: reward of each step.
        values: V_t, the value of the state in which step t acts.
        next_values: V'_t, the value of the state that step t leads to, before any reset: 0 where the episode
            terminated, the critic's value of the final observation where it was truncated.
        ends: the last step of each episode, however it ended. A row's last episode may be unfinished.
        valid: steps that were executed; the others (a tool's output, a reset that counts as a step, steps after an
            end) are never read, and cost no discount.
        gamma: discount per step.
        lam: trade-off between bias (0) and variance (1), or one for each row.
    """
    values = select(values, valid)
    differences = select(rewards, valid) + gamma * select(next_values, valid) - values
    decay = gamma * lam
    if isinstance(decay, Tensor):
        decay = decay[:, None].to(differences.dtype)
    carry = torch.where(valid.bool(), decay, torch.ones_like(differences)).masked_fill(ends.bool(), 0.0)
    advantages = linear_recurrence(select(differences, valid), carry)
    return Advantages(select(advantages, valid), select(advantages + values, valid))


@torch.no_grad()
def discounted_sums(
    rewards: Float[Tensor, "B T"], starts: Mask, before: Float[Tensor, " B"], gamma: Fraction
) -> Float[Tensor, "B T"]:
    """Return the discounted sum of an episode's rewards so far: R_t = r_t + gamma R_{t-1}, and R_t = r_t at its start.

    Args:
        rewards: reward of each step.
        starts: the first step of each episode.
        before: R of the step before the first one.
        gamma: discount per step.
    """
    rewards = widen(rewards)
    carry = gamma * (~starts.bool()).to(rewards.dtype)
    rewards = torch.cat(
        [rewards[:, :1] + _carried(carry[:, :1], widen(before)[:, None].expand_as(carry[:, :1])), rewards[:, 1:]], dim=1
    )
    return linear_recurrence(rewards.flip(1), carry.flip(1)).flip(1)


def linear_recurrence(x: Float[Tensor, "B T"], carry: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Solve y_t = x_t + carry_t y_{t+1}, with y = 0 after the last, in log2(T) passes instead of T.

    After a pass over distance s, x_t holds the sum over the next 2s terms and carry_t the product of as many factors
    (Hillis and Steele 1986).
    """
    x, carry = x.clone(), carry.clone()
    distance = 1
    while distance < x.shape[1]:
        head = slice(None, -distance)
        # Both right-hand sides are computed before either is assigned.
        x[:, head], carry[:, head] = (
            x[:, head] + _carried(carry[:, head], x[:, distance:]),
            carry[:, head] * carry[:, distance:],
        )
        distance *= 2
    return x


def _carried(carry: Float[Tensor, "B T"], later: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Multiply, with 0 at the end of an episode."""
    # 0 times a NaN of the next episode would be NaN.
    return torch.where(carry == 0, 0.0, carry * later)
