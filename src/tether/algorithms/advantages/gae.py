"""Generalised advantage estimation, and the other estimators that use the reward of each token.

Rows may hold many consecutive episodes, as simulators return them (`episodic_gae`).
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algorithms.advantages.result import Advantages
from tether.algorithms.masking import masked_sum, masked_whiten, select, spread, widen
from tether.algorithms.registry import Fraction, Positive
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
        valid: steps that were executed. Other positions (a tool's output, a reset that counts as a step, steps after an
            end) are never read and add no discount.
        gamma: discount per step.
        lam: trade-off between bias (0) and variance (1): one number, or one for each row.
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
        before: R of the step before the first step of the rows.
        gamma: discount per step.
    """
    rewards = widen(rewards)
    carry = gamma * (~starts.bool()).to(rewards.dtype)
    rewards = torch.cat(
        [rewards[:, :1] + _carried(carry[:, :1], widen(before)[:, None].expand_as(carry[:, :1])), rewards[:, 1:]], dim=1
    )
    return linear_recurrence(rewards.flip(1), carry.flip(1)).flip(1)


def linear_recurrence(x: Float[Tensor, "B T"], carry: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Solve y_t = x_t + carry_t y_{t+1}, with y = 0 after the last step, in log2(T) passes instead of T.

    After a pass over distance s, x_t holds the sum over the next 2s terms and carry_t the product of the same number of
    factors (Hillis and Steele 1986).
    """
    x, carry = x.clone(), carry.clone()
    distance = 1
    while distance < x.shape[1]:
        head = slice(None, -distance)
        # The tuple assignment computes both right-hand sides before it overwrites either tensor.
        x[:, head], carry[:, head] = (
            x[:, head] + _carried(carry[:, head], x[:, distance:]),
            carry[:, head] * carry[:, distance:],
        )
        distance *= 2
    return x


def _carried(carry: Float[Tensor, "B T"], later: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Multiply, but return 0 where `carry` is 0, at the end of an episode."""
    # The later term may be a NaN of the next episode, and 0 times NaN would be NaN.
    return torch.where(carry == 0, 0.0, carry * later)


def gae(
    token_level_rewards: Tokens,
    response_mask: Mask,
    *,
    values: Tokens,
    gamma: Fraction = 1.0,
    lam: Fraction | Rows = 1.0,
    critic_lam: Fraction | None = None,
    bootstrap_values: Rows | None = None,
    normalize_advantages: bool = True,
) -> Advantages:
    """Exponentially weighted sum of temporal differences (Schulman et al. 2016, arXiv 1506.02438).

    d_t = r_t + gamma V_{t+1} - V_t and A_t = d_t + gamma lam A_{t+1}, where t + 1 is the row's next *policy* token:
    positions in between (a tool's output, padding) are skipped, whatever their reward, and add no discount.
    Returns are A + V; the advantages are whitened over the full batch afterwards.

    Assumes: the critic is close to the value function of the sampling policy. Lambda trades its bias (0) for the
        variance of returns (1).
    Use it: with a critic, where credit must be assigned within a long answer, or with one answer per prompt.
    Watch: `critic/vf_explained_var`: at 0 or below, the critic adds noise; warm it up first (`trainer.critic_warmup`).
    Keys: `algorithm.adv_estimator=gae`, `algorithm.gamma`, `algorithm.lam`, `algorithm.lam_critic`,
        `algorithm.bootstrap_truncated`.

    Args:
        token_level_rewards: reward of each token.
        response_mask: the policy's tokens.
        values: V_t, the critic's estimate before token t.
        gamma: discount for each policy token.
        lam: lambda, or one lambda for each row (`length_adaptive_lambda`).
        critic_lam: a different lambda for the returns (VAPO's decoupled GAE); None uses the same.
        bootstrap_values: value of the state after the last token: the critic's where a row was truncated, 0 where it
            ended by itself. None: 0 everywhere, as in verl.
        normalize_advantages: whiten (`masked_whiten`).
    """
    next_values = _next_values(values, response_mask, bootstrap_values)
    no_ends = torch.zeros_like(response_mask)
    estimate = episodic_gae(token_level_rewards, values, next_values, no_ends, response_mask, gamma=gamma, lam=lam)
    if normalize_advantages:
        estimate = replace(estimate, advantages=masked_whiten(estimate.advantages, response_mask))
    if critic_lam is None:
        return estimate
    decoupled = episodic_gae(
        token_level_rewards, values, next_values, no_ends, response_mask, gamma=gamma, lam=critic_lam
    )
    return replace(estimate, returns=decoupled.returns)


def length_adaptive_lambda(response_mask: Mask, alpha: Positive) -> Rows:
    """Return each row's lambda, 1 - 1 / (alpha n) for n tokens and at least 0 (VAPO, arXiv 2504.05118).

    Temporal differences at the end then propagate back over a constant share of the row. VAPO uses alpha = 0.05.

    Assumes: the longer an answer, the more of its tokens contribute to its final reward.
    Use it: with `gae`, where the answers of a batch differ much in length.
    Watch: `response_length/mean` (1000 tokens have lambda 0.98 with VAPO's alpha), `critic/vf_explained_var`.
    Keys: `algorithm.lam_actor_alpha`.
    """
    length = response_mask.bool().sum(dim=-1).clamp(min=1)
    return (1 - 1 / (alpha * length)).clamp(min=0.0)


def reinforce_plus_plus(token_level_rewards: Tokens, response_mask: Mask, *, gamma: Fraction = 1.0) -> Advantages:
    """Whitened discounted return of each token (REINFORCE++, Hu 2025, arXiv 2501.03262); needs no critic, no groups.

    G_t = r_t + gamma G_{t+1} over the row's policy tokens, then whitened over the batch. Rewards after a tool's output
    are also credited to the tokens before it.

    Assumes: prompts are about equally hard, so that the batch mean is a usable baseline for all of them.
    Use it: with one answer per prompt and no memory for a critic; with several, `reinforce_plus_plus_baseline` is
        less noisy.
    Watch: `actor/grad_norm`: its spread shows the variance that the coarse baseline leaves.
    Keys: `algorithm.adv_estimator=reinforce_plus_plus`, `algorithm.gamma`.
    """
    returns = discounted_returns(token_level_rewards, response_mask, gamma)
    return Advantages(masked_whiten(returns, response_mask), returns)


def remax(token_level_rewards: Tokens, response_mask: Mask, *, reward_baselines: Rows) -> Advantages:
    """Return of each token minus the score of a greedy answer (ReMax, Li et al. 2024, arXiv 2310.10505).

    A_t = sum_{s >= t} r_s - b, where b is the score of the prompt's greedily decoded response (temperature 0).

    Assumes: the greedy answer is about as good as the average sampled one. The baseline does not depend on the sample,
        so the gradient stays unbiased.
    Use it: with one sampled answer per prompt; it costs one additional greedy answer.
    Watch: `baseline/beaten_fraction`: near 0, greedy decoding beats the samples, and the temperature may be too high.
    Keys: `algorithm.adv_estimator=remax`.
    """
    returns = discounted_returns(token_level_rewards, response_mask, gamma=1.0)
    return Advantages(returns - spread(reward_baselines, response_mask), returns)


def raw(token_level_rewards: Tokens, response_mask: Mask, *, normalize_advantages: bool = False) -> Advantages:
    """The score of a row as the advantage of its tokens: REINFORCE without a baseline (RLinf's ``raw``).

    A_t = s at every token, with s the sum of the row's rewards; with normalize_advantages whitened over the batch.

    Assumes: scores are already centred, or their absolute size is meant to matter.
    Use it: as the control of an experiment; any baseline reduces the variance.
    Watch: `actor/grad_norm`, compared with that of an estimator with a baseline.
    Keys: `algorithm.adv_estimator=raw`.
    """
    scores = spread(masked_sum(token_level_rewards, response_mask, dim=-1), response_mask)
    return Advantages(masked_whiten(scores, response_mask) if normalize_advantages else scores, scores)


def discounted_returns(token_level_rewards: Tokens, response_mask: Mask, gamma: float) -> Tokens:
    """Return the sum of rewards from each policy token on, discounted by gamma per policy token; 0 outside the mask."""
    zeros, no_ends = torch.zeros_like(token_level_rewards), torch.zeros_like(response_mask)
    return episodic_gae(token_level_rewards, zeros, zeros, no_ends, response_mask, gamma=gamma, lam=1.0).advantages


def _next_values(values: Tokens, response_mask: Mask, bootstrap_values: Rows | None) -> Tokens:
    """Return the value of the policy token that follows each token; `bootstrap_values`, or 0, after the last one."""
    mask = response_mask.bool()
    values = select(values, mask)
    last = values.new_zeros(len(values))
    if bootstrap_values is not None:
        last = select(bootstrap_values, mask.any(dim=-1)).to(values.dtype)
    width = mask.shape[1]
    position = torch.arange(width, device=mask.device).where(mask, width)
    following = torch.cat([position[:, 1:], position.new_full((len(position), 1), width)], dim=1)[:, :width]
    following = following.flip(1).cummin(dim=1).values.flip(1)
    return torch.cat([values, last[:, None]], dim=1).gather(1, following)
