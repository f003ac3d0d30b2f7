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
from tether.models.control.spec import Memory, Observations, Review, numbers_of, with_numbers
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
    """Step and column of what is bootstrapped."""


@dataclass(frozen=True)
class _Layout:
    """How what C decisions in M columns have becomes rows of samples: [S, ...] of those that are kept, or, to be cut
    into sequences, [M * C, ...] of all."""

    kept: Tensor
    """[C, M]: decisions that are learned from."""
    in_sequences: bool

    def decisions(self, of: Observations) -> Any:
        """Rows of what is [C, M, ...]."""
        if self.in_sequences:
            return of.transpose(0, 1).flatten(0, 1)
        return of.flatten(0, 1)[self.kept.flatten()]

    def columns(self, of: Tensor) -> Tensor:
        """Rows [..., R / C] of what is [M, R]."""
        return self.decisions(of.unflatten(1, (len(self.kept), -1)).transpose(0, 1))

    def sequences(self, samples: Samples, starts: Tensor, state: Tensor) -> Samples:
        """Cut rows of all decisions into the columns [M, C, ...] in which something is kept.

        What a decision saw that is not kept is set to zero, so that it has no part in any gradient.
        """
        kept = self.kept.T
        some = kept.any(dim=1)
        numbers = torch.where(kept.flatten()[:, None], numbers_of(samples.obs), 0.0)
        samples = replace(samples, obs=with_numbers(samples.obs, numbers))
        samples = samples.each(lambda column: column.unflatten(0, kept.shape)[some])
        return replace(samples, memory=Memory(starts[:-1].T, state, kept).rows(some))


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
    obs = policy.normalized(rollout.obs)
    decided = (rollout.final_at[0] // chunk, rollout.final_at[1])
    final_obs = policy.normalized(rollout.final_obs)
    said = policy.review(obs, rollout.starts, rollout.state, final_obs, decided, rollout.actions)
    steps = _steps(rollout, rewards, valid, options.reward_level)
    values, estimate = _estimate(steps, said, options)
    lay = _Layout(valid.T[::chunk], in_sequences=policy.state_width > 0)
    actions = lay.decisions(rollout.actions)
    mask = lay.columns(valid) if chunk > 1 else None
    columns = policy.head.evaluate(lay.decisions(said.outputs), actions).log_probs
    log_probs = at_level(columns, options.logprob_level, chunk, mask)
    samples = Samples(
        obs=lay.decisions(obs[:-1]),
        actions=actions,
        old_log_probs=log_probs,
        advantages=per_column(lay.columns(estimate.advantages), log_probs.shape[1]),
        values=None if values is None else lay.columns(values),
        returns=None if values is None else lay.columns(estimate.returns),
        mask=mask,
        weights=None if options.episode_length is None else _episode_weights(valid, lay, options.episode_length),
    )
    if policy.state_width:
        samples = lay.sequences(samples, rollout.starts, rollout.state)
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
    valid, lost = rollout.valid.T, (rollout.truncated & ~rollout.valid).T
    if options.estimator != CRITIC:  # an episode that was lost with its process has no score
        valid = valid & ~lost.any(dim=1, keepdim=True)
    elif rollout.chunk > 1:  # a part of a chunk leads to no state that could be valued
        valid = valid & ~per_column(lost.unflatten(1, (-1, rollout.chunk)).any(dim=-1), lost.shape[1])
    if options.group_size == 1 and options.reward_bounds is None:
        return valid, {}
    scores = masked_sum(rollout.rewards.T, valid, dim=-1)
    uid = torch.arange(len(scores)) // options.group_size
    metrics = group_metrics(scores, uid, valid.any(dim=1)) if options.estimator != CRITIC else {}
    if options.reward_bounds is None:
        return valid, metrics
    low, high = options.reward_bounds
    mean = scores.unflatten(0, (-1, options.group_size)).mean(dim=1).repeat_interleave(options.group_size)
    kept = (mean >= low) & (mean <= high)
    return valid & kept[:, None], metrics | {"group/kept_fraction": float(kept.float().mean())}


def _steps(rollout: EnvRollout, rewards: Tensor, valid: Tensor, level: str) -> _Steps:
    terminated, ended = rollout.terminated.T, (rollout.terminated | rollout.truncated).T
    steps = _Steps(rewards, terminated, ended, valid, rollout.final_at)
    if level == "action_level" or rollout.chunk == 1:
        return steps
    flags = {
        name: getattr(steps, name).unflatten(1, (-1, rollout.chunk)).any(dim=-1)
        for name in ("terminated", "ended", "valid")
    }
    sums = masked_sum(rewards.unflatten(1, (-1, rollout.chunk)), valid.unflatten(1, (-1, rollout.chunk)), dim=-1)
    return replace(steps, rewards=sums, **flags, final_at=(rollout.final_at[0] // rollout.chunk, rollout.final_at[1]))


def _estimate(steps: _Steps, said: Review, options: SampleOptions) -> tuple[Tensor | None, Advantages]:
    """Values [M, R], where there is a critic, and advantages."""
    count = steps.rewards.shape[1]
    if options.estimator != CRITIC:
        uid = torch.arange(len(steps.rewards)) // options.group_size
        estimator = ADVANTAGE_ESTIMATORS[options.estimator]
        return None, estimator(steps.rewards, steps.valid, uid=uid, gamma=options.gamma, **options.estimator_options)
    # Of a chunk's observation come the values before each of its actions: in the order of time, one after the other.
    assert said.values is not None
    assert said.final_values is not None
    values = said.values.transpose(1, 2).flatten(0, 1)[: count + 1]
    next_values = values[1:].clone()
    next_values[steps.terminated.T] = 0.0
    next_values[steps.final_at] = said.final_values[:, 0]
    estimate = episodic_gae(
        steps.rewards, values[:-1].T, next_values.T, steps.ended, steps.valid, gamma=options.gamma, lam=options.lam
    )
    if options.normalize_advantages:
        estimate = replace(estimate, advantages=masked_whiten(estimate.advantages, steps.valid))
    return values[:-1].T, estimate


def _episode_weights(valid: Tensor, lay: _Layout, episode_length: float) -> Tensor:
    """Weight [S, 1] of each row: episode_length over the steps of its episode, the column.

    RLinf's mean runs over all rows, of which only those that were carried out are here; so the weight has their share
    in it.
    """
    weights = (episode_length / valid.sum(dim=1).clamp(min=1)) * lay.kept.float().mean()
    return lay.decisions(weights.expand(len(lay.kept), -1)[..., None])
