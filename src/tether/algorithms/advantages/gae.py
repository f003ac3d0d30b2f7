"""Generalised advantage estimation, and the other estimators that use the reward of each token."""

from dataclasses import replace

import torch

from tether.algorithms.advantages.episodes import episodic_gae
from tether.algorithms.advantages.result import Advantages
from tether.algorithms.checks import Fraction, Positive
from tether.algorithms.masking import masked_sum, masked_whiten, select, spread
from tether.algorithms.shapes import Mask, Rows, Tokens


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
    positions between two of them (a tool's output, padding) are skipped, whatever their reward, and cost no discount.
    Returns are A + V; the advantages are whitened over the full batch afterwards.

    Assumes: the critic is near the value of the policy that sampled. Lambda trades its bias (0) for the variance of
        returns (1).
    Use it: with a critic: where credit must be assigned inside a long answer, or with one answer to each prompt.
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
    """Return a lambda for each row by its length: 1 - 1 / (alpha n) for n tokens, not below 0 (VAPO, arXiv 2504.05118).

    Temporal differences at the end then reach back over a constant share of the row. VAPO uses alpha = 0.05.

    Assumes: the longer an answer, the more of its tokens matter to its end.
    Use it: with `gae`, where answers of very different length share a batch.
    Watch: `response_length/mean` (1000 tokens have lambda 0.98 with VAPO's alpha), `critic/vf_explained_var`.
    Keys: `algorithm.lam_actor_alpha`.
    """
    length = response_mask.bool().sum(dim=-1).clamp(min=1)
    return (1 - 1 / (alpha * length)).clamp(min=0.0)


def reinforce_plus_plus(token_level_rewards: Tokens, response_mask: Mask, *, gamma: Fraction = 1.0) -> Advantages:
    """Whitened discounted return of each token (REINFORCE++, Hu 2025, arXiv 2501.03262); needs no critic, no groups.

    G_t = r_t + gamma G_{t+1} over the row's policy tokens, then whitened over the batch. What comes after a tool's
    output is credited to the tokens before it too.

    Assumes: prompts are about equally hard, so that the mean of the batch is a baseline for all.
    Use it: with one answer to each prompt and no memory for a critic; with several, `reinforce_plus_plus_baseline` is
        less noisy.
    Watch: `actor/grad_norm`: its spread is what the coarse baseline costs.
    Keys: `algorithm.adv_estimator=reinforce_plus_plus`, `algorithm.gamma`.
    """
    returns = discounted_returns(token_level_rewards, response_mask, gamma)
    return Advantages(masked_whiten(returns, response_mask), returns)


def remax(token_level_rewards: Tokens, response_mask: Mask, *, reward_baselines: Rows) -> Advantages:
    """Return of each token minus the score of a greedy answer (ReMax, Li et al. 2024, arXiv 2310.10505).

    A_t = sum_{s >= t} r_s - b, where b is the score of the prompt's greedily decoded response (temperature 0).

    Assumes: the greedy answer is about as good as the average sampled one. The baseline does not depend on the sample,
        so the gradient stays unbiased.
    Use it: with one sampled answer to each prompt, at the price of one greedy answer more.
    Watch: `baseline/beaten_fraction`: near 0, greedy decoding beats the samples, and the temperature may be too high.
    Keys: `algorithm.adv_estimator=remax`.
    """
    returns = discounted_returns(token_level_rewards, response_mask, gamma=1.0)
    return Advantages(returns - spread(reward_baselines, response_mask), returns)


def raw(token_level_rewards: Tokens, response_mask: Mask, *, normalize_advantages: bool = False) -> Advantages:
    """The score of a row as the advantage of its tokens: REINFORCE without a baseline (RLinf's ``raw``).

    A_t = s at every token, with s the sum of the row's rewards; with normalize_advantages whitened over the batch.

    Assumes: scores are centred already, or their size is meant to matter.
    Use it: as the control of an experiment; any baseline has less variance.
    Watch: `actor/grad_norm`, against that of an estimator with a baseline.
    Keys: `algorithm.adv_estimator=raw`.
    """
    scores = spread(masked_sum(token_level_rewards, response_mask, dim=-1), response_mask)
    return Advantages(masked_whiten(scores, response_mask) if normalize_advantages else scores, scores)


def discounted_returns(token_level_rewards: Tokens, response_mask: Mask, gamma: float) -> Tokens:
    """Return the sum of rewards from each policy token on, discounted by gamma per policy token; 0 outside the mask."""
    zeros, no_ends = torch.zeros_like(token_level_rewards), torch.zeros_like(response_mask)
    return episodic_gae(token_level_rewards, zeros, zeros, no_ends, response_mask, gamma=gamma, lam=1.0).advantages


def _next_values(values: Tokens, response_mask: Mask, bootstrap_values: Rows | None) -> Tokens:
    """Return the value of the policy token that follows each token; after the last one `bootstrap_values`, or 0."""
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
