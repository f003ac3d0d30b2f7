"""From a rollout to samples to learn from: values, advantages, log-probabilities.

M columns of T steps; at ``chunk_level`` the K steps of a chunk are one, with the sum of their rewards, so that R = C
instead of R = T rewards of a column are estimated from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tether.algorithms import (
    ADVANTAGE_ESTIMATORS,
    Advantages,
    episodic_gae,
    explained_variance,
    masked_sum,
    masked_whiten,
)
from tether.metrics.data import group_metrics
from tether.models.control.mlp_policy import Policy
from tether.models.control.spec import Memory, Review, numbers_of, with_numbers
from tether.rollout.env.collector import EnvRollout
from tether.training.control.chunk_levels import Level, at_level, per_column
from tether.training.control.samples import Samples

CRITIC = "gae"
"""The estimator that has a critic."""


@dataclass(frozen=True)
class SampleOptions:
    """How a rollout becomes samples to learn from."""

    gamma: float
    lam: float
    estimator: str = CRITIC
    """In ``ADVANTAGE_ESTIMATORS``. All but gae take a column as one answer: an episode that begins with the rollout."""
    estimator_options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the others."""
    normalize_advantages: bool = True
    """gae: bring them to mean 0 and variance 1."""
    group_size: int = 1
    """Columns in a row that began in the same state."""
    reward_bounds: tuple[float, float] | None = None
    """Groups whose mean reward of an episode is outside teach nothing."""
    reward_level: Literal["action_level", "chunk_level"] = "action_level"
    logprob_level: Level = "action_level"
    episode_length: float | None = None
    """Length at which an episode has weight 1; None: steps weigh alike, and episodes by their length."""


@dataclass(frozen=True)
class _Steps:
    """What is estimated from, [M, R] each."""

    rewards: Tensor
    terminated: Tensor
    ended: Tensor
    valid: Tensor
    final_at: tuple[Tensor, Tensor]
    """Column and step of what is bootstrapped."""


@torch.no_grad()
def make_samples(
    rollout: EnvRollout, rewards: Tensor, policy: Policy, options: SampleOptions
) -> tuple[Samples, dict[str, float]]:
    """Value what the policy saw, estimate advantages, and lay the decisions that were carried out as rows.

    Log-probabilities and values come from one pass over the whole rollout: acting needs neither.

    Args:
        rollout: what was seen and done.
        rewards: [M, T], as they are learned from.
        policy: that sampled.
        options: the rest.

    Returns:
        The samples, and metrics of the rollout.
    """
    chunk = rollout.chunk
    valid, metrics = _valid(rollout, options)
    learned = valid[:, ::chunk]
    obs = policy.inputs(rollout.obs)
    column, step = rollout.final_at
    review = policy.review(
        obs,
        rollout.starts,
        rollout.state,
        policy.inputs(rollout.final_obs),
        (column, step // chunk),
        rollout.actions,
    )
    steps = _steps(rollout, rewards, valid, options.reward_level)
    values, estimate = _estimate(steps, review, options)
    mask = _of_decisions(valid, learned) if chunk > 1 else None
    columns = policy.head.evaluate(review.outputs, rollout.actions).log_probs
    log_probs = at_level(columns, options.logprob_level, chunk, mask)
    samples = Samples(
        obs=obs[:, :-1],
        actions=rollout.actions,
        old_log_probs=log_probs,
        advantages=per_column(_of_decisions(estimate.advantages, learned), log_probs.shape[-1]),
        values=None if values is None else _of_decisions(values, learned),
        returns=None if values is None else _of_decisions(estimate.returns, learned),
        mask=mask,
        weights=None if options.episode_length is None else _episode_weights(valid, learned, options.episode_length),
    )
    samples = _in_sequences(samples, rollout, learned) if policy.state_width else _in_rows(samples, learned)
    if len(samples):
        metrics["critic/rewards/mean"] = float(steps.rewards[steps.valid].mean())
    if len(samples) and values is not None:
        metrics |= {
            "critic/returns/mean": float(estimate.returns[steps.valid].mean()),
            "critic/values/mean": float(values[steps.valid].mean()),
            "critic/vf_explained_var": float(explained_variance(values, estimate.returns, steps.valid)),
        }
    return samples, metrics


def _valid(rollout: EnvRollout, options: SampleOptions) -> tuple[Tensor, dict[str, float]]:
    """Steps [M, T] that teach something, and metrics of the groups of columns that began alike."""
    valid, lost = rollout.valid, rollout.truncated & ~rollout.valid
    if options.estimator != CRITIC:  # an episode that was lost with its process has no score
        valid = valid & ~lost.any(dim=1, keepdim=True)
    elif rollout.chunk > 1:  # a part of a chunk leads to no state that could be valued
        valid = valid & ~per_column(lost.unflatten(1, (-1, rollout.chunk)).any(dim=-1), lost.shape[1])
    if options.group_size == 1 and options.reward_bounds is None:
        return valid, {}
    scores = masked_sum(rollout.rewards, valid, dim=-1)
    uid = torch.arange(len(scores)) // options.group_size
    metrics = group_metrics(scores, uid, valid.any(dim=1)) if options.estimator != CRITIC else {}
    if options.reward_bounds is None:
        return valid, metrics
    low, high = options.reward_bounds
    mean = scores.unflatten(0, (-1, options.group_size)).mean(dim=1).repeat_interleave(options.group_size)
    kept = (mean >= low) & (mean <= high)
    return valid & kept[:, None], metrics | {"group/kept_fraction": float(kept.float().mean())}


def _steps(rollout: EnvRollout, rewards: Tensor, valid: Tensor, level: str) -> _Steps:
    steps = _Steps(rewards, rollout.terminated, rollout.terminated | rollout.truncated, valid, rollout.final_at)
    if level == "action_level" or rollout.chunk == 1:
        return steps
    flags = {
        name: getattr(steps, name).unflatten(1, (-1, rollout.chunk)).any(dim=-1)
        for name in ("terminated", "ended", "valid")
    }
    column, step = rollout.final_at
    sums = masked_sum(rewards.unflatten(1, (-1, rollout.chunk)), valid.unflatten(1, (-1, rollout.chunk)), dim=-1)
    return replace(steps, rewards=sums, **flags, final_at=(column, step // rollout.chunk))


def _estimate(steps: _Steps, review: Review, options: SampleOptions) -> tuple[Tensor | None, Advantages]:
    """Values [M, R], where there is a critic, and advantages."""
    count = steps.rewards.shape[1]
    if options.estimator != CRITIC:
        uid = torch.arange(len(steps.rewards)) // options.group_size
        estimator = ADVANTAGE_ESTIMATORS[options.estimator]
        return None, estimator(steps.rewards, steps.valid, uid=uid, gamma=options.gamma, **options.estimator_options)
    # Of a chunk's observation come the values before each of its actions: in the order of time, one after the other.
    assert review.values is not None
    assert review.final_values is not None
    values = review.values.flatten(1)[:, : count + 1]
    next_values = values[:, 1:].clone()
    next_values[steps.terminated] = 0.0
    next_values[steps.final_at] = review.final_values[:, 0]
    estimate = episodic_gae(
        steps.rewards, values[:, :-1], next_values, steps.ended, steps.valid, gamma=options.gamma, lam=options.lam
    )
    if options.normalize_advantages:
        estimate = replace(estimate, advantages=masked_whiten(estimate.advantages, steps.valid))
    return values[:, :-1], estimate


def _of_decisions(of: Tensor, learned: Tensor) -> Tensor:
    """Group the steps [M, R] by the decisions [M, C] that they belong to, [M, C, R / C]."""
    return of.unflatten(1, (learned.shape[1], -1))


def _in_rows(samples: Samples, learned: Tensor) -> Samples:
    """Lay the decisions [M, C, ...] that are learned from out as rows [S, ...], in the order of time."""
    decision, column = learned.T.nonzero(as_tuple=True)
    return samples.each(lambda of: of[column, decision])


def _in_sequences(samples: Samples, rollout: EnvRollout, learned: Tensor) -> Samples:
    """Keep the columns [M, C, ...] in which something is learned from.

    What the other decisions saw is set to zero, so that it has no part in any gradient.
    """
    numbers = torch.where(learned[..., None], numbers_of(samples.obs), 0.0)
    memory = Memory(rollout.starts[:, :-1], rollout.state, learned)
    some = learned.any(dim=1)
    return replace(samples, obs=with_numbers(samples.obs, numbers), memory=memory).each(lambda of: of[some])


def _episode_weights(valid: Tensor, learned: Tensor, episode_length: float) -> Tensor:
    """Weight [M, C, 1] of each decision: episode_length over the steps of its episode, the column.

    RLinf's mean runs over all decisions, of which only those that were carried out are learned from; so the weight has
    their share in it.
    """
    weights = (episode_length / valid.sum(dim=1).clamp(min=1)) * learned.float().mean()
    return weights[:, None, None].expand(*learned.shape, 1)
