"""Advantages of a rollout of environments, and the decisions that are learned from.

M rows of T steps; at ``chunk_level`` the K steps of a chunk are one, with the sum of their rewards, so that R = C
instead of R = T rewards of a row are estimated from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

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
from tether.algorithms.aggregation import episode_weights
from tether.batch import EnvBatch, filled
from tether.metrics.data import group_metrics
from tether.models.control import Memory, numbers_of, with_numbers
from tether.training.control import Samples, per_column

CRITIC = "gae"
"""The estimator that has a critic."""


@dataclass(frozen=True)
class _Steps:
    """Inputs of the estimators, [M, R] each."""

    rewards: Tensor
    terminated: Tensor
    ended: Tensor
    valid: Tensor
    final_at: tuple[Tensor, Tensor]
    """Row and step of what is bootstrapped."""


@dataclass(frozen=True)
class ControlAdvantages:
    """Fills in `response_mask`, `advantages` and `returns`."""

    gamma: float
    lam: float
    estimator: str = CRITIC
    """In ``ADVANTAGE_ESTIMATORS``. All but gae take a row as one answer: an episode that begins with the rollout."""
    estimator_options: Mapping[str, object] = field(default_factory=dict)
    """Keywords of the others."""
    normalize_advantages: bool = True
    """gae: bring them to mean 0 and variance 1."""
    group_size: int = 1
    """Rows next to each other that began in the same state."""
    reward_bounds: tuple[float, float] | None = None
    """Groups whose mean reward of an episode is outside teach nothing."""
    reward_level: Literal["action_level", "chunk_level"] = "action_level"

    @torch.no_grad()
    def __call__(self, batch: EnvBatch) -> dict[str, float]:
        """Estimate; returns metrics of the rollout.

        Args:
            batch: with `token_level_rewards`, and with values where the estimator has a critic.
        """
        mask, metrics = self._learned(batch)
        steps = self._steps(batch, mask)
        values, estimate = self._estimate(steps, batch)
        batch.response_mask, batch.advantages = mask, estimate.advantages
        batch.returns = None if values is None else estimate.returns
        if steps.valid.any():
            metrics["critic/rewards/mean"] = float(steps.rewards[steps.valid].mean())
            if values is not None:
                metrics |= {
                    "critic/returns/mean": float(estimate.returns[steps.valid].mean()),
                    "critic/values/mean": float(values[steps.valid].mean()),
                    "critic/vf_explained_var": float(explained_variance(values, estimate.returns, steps.valid)),
                }
        return metrics

    def _learned(self, batch: EnvBatch) -> tuple[Tensor, dict[str, float]]:
        """Steps [M, T] that teach something, and metrics of the groups of rows that began alike."""
        valid, lost = batch.valid, batch.truncated & ~batch.valid
        if self.estimator != CRITIC:  # an episode that was lost with its process has no score
            valid = valid & ~lost.any(dim=1, keepdim=True)
        elif batch.chunk > 1:  # a part of a chunk leads to no state that could be valued
            valid = valid & ~per_column(lost.unflatten(1, (-1, batch.chunk)).any(dim=-1), lost.shape[1])
        if self.group_size == 1 and self.reward_bounds is None:
            return valid, {}
        scores = masked_sum(batch.token_level_scores, valid, dim=-1)
        uid = torch.arange(len(scores)) // self.group_size
        metrics = group_metrics(scores, uid, valid.any(dim=1)) if self.estimator != CRITIC else {}
        if self.reward_bounds is None:
            return valid, metrics
        low, high = self.reward_bounds
        mean = scores.unflatten(0, (-1, self.group_size)).mean(dim=1).repeat_interleave(self.group_size)
        kept = (mean >= low) & (mean <= high)
        return valid & kept[:, None], metrics | {"group/kept_fraction": float(kept.float().mean())}

    def _steps(self, batch: EnvBatch, valid: Tensor) -> _Steps:
        rewards, ended = filled(batch.token_level_rewards), batch.terminated | batch.truncated
        steps = _Steps(rewards, batch.terminated, ended, valid, batch.final_at)
        if self.reward_level == "action_level" or batch.chunk == 1:
            return steps
        flags = {
            name: getattr(steps, name).unflatten(1, (-1, batch.chunk)).any(dim=-1)
            for name in ("terminated", "ended", "valid")
        }
        row, step = batch.final_at
        sums = masked_sum(rewards.unflatten(1, (-1, batch.chunk)), valid.unflatten(1, (-1, batch.chunk)), dim=-1)
        return replace(steps, rewards=sums, **flags, final_at=(row, step // batch.chunk))

    def _estimate(self, steps: _Steps, batch: EnvBatch) -> tuple[Tensor | None, Advantages]:
        """Values [M, R], where there is a critic, and advantages."""
        count = steps.rewards.shape[1]
        if self.estimator != CRITIC:
            uid = torch.arange(len(steps.rewards)) // self.group_size
            estimator = ADVANTAGE_ESTIMATORS[self.estimator]
            return None, estimator(steps.rewards, steps.valid, uid=uid, gamma=self.gamma, **self.estimator_options)
        # Of a chunk's observation come the values before each of its actions: in the order of time, one by one.
        values = filled(batch.values).flatten(1)[:, : count + 1]
        next_values = values[:, 1:].clone()
        next_values[steps.terminated] = 0.0
        next_values[steps.final_at] = filled(batch.bootstrap_values)[:, 0]
        estimate = episodic_gae(
            steps.rewards, values[:, :-1], next_values, steps.ended, steps.valid, gamma=self.gamma, lam=self.lam
        )
        if self.normalize_advantages:
            estimate = replace(estimate, advantages=masked_whiten(estimate.advantages, steps.valid))
        return values[:, :-1], estimate


@dataclass(frozen=True)
class LearnedDecisions:
    """Lays the decisions that are learned from out as rows, or in sequences for a policy with a memory."""

    has_memory: bool = False
    episode_length: float | None = None
    """Length at which an episode has weight 1; None: steps weigh alike, and episodes by their length."""
    keeps_observed: bool = False
    """Also the observations themselves, for the policy's statistics."""

    @torch.no_grad()
    def __call__(self, batch: EnvBatch, step: int) -> tuple[Samples, dict[str, float]]:
        """The samples of a batch with advantages, and no metrics; see `tether.trainer.loop.SelectRows`."""
        mask, log_probs, advantages = filled(batch.response_mask), filled(batch.old_log_probs), filled(batch.advantages)
        learned = mask[:, :: batch.chunk]
        values = None
        if batch.returns is not None:
            values = filled(batch.values).flatten(1)[:, : advantages.shape[1]]
        assert batch.seen is not None
        samples = Samples(
            obs=batch.seen[:, :-1],
            actions=batch.actions,
            old_log_probs=log_probs,
            advantages=per_column(_of_decisions(advantages, learned), log_probs.shape[-1]),
            values=None if values is None else _of_decisions(values, learned),
            returns=None if batch.returns is None else _of_decisions(batch.returns, learned),
            mask=_of_decisions(mask, learned) if batch.chunk > 1 else None,
            weights=None if self.episode_length is None else self._episode_weights(mask, learned),
            observed=batch.obs[batch.carried_out] if self.keeps_observed else None,
        )
        laid_out = self._in_sequences(samples, batch, learned) if self.has_memory else _in_rows(samples, learned)
        return laid_out, {}

    def _in_sequences(self, samples: Samples, batch: EnvBatch, learned: Tensor) -> Samples:
        """Keep the rows [M, C, ...] in which something is learned from.

        What the other decisions saw is set to zero, so that it has no part in any gradient.
        """
        numbers = torch.where(learned[..., None], numbers_of(samples.obs), 0.0)
        memory = Memory(batch.starts[:, :-1], batch.state, learned)
        some = learned.any(dim=1)
        return replace(samples, obs=with_numbers(samples.obs, numbers), memory=memory).each(lambda of: of[some])

    def _episode_weights(self, valid: Tensor, learned: Tensor) -> Tensor:
        """Weight [M, C, 1] of each decision: `episode_length` over the steps of its episode, the row.

        RLinf's mean runs over all decisions, of which only those that were carried out are learned from; so the weight
        has their share in it.
        """
        assert self.episode_length is not None
        weights = episode_weights(valid.sum(dim=1), self.episode_length) * learned.float().mean()
        return weights[:, None, None].expand(*learned.shape, 1)


def _of_decisions(of: Tensor, learned: Tensor) -> Tensor:
    """Group the steps [M, R] by the decisions [M, C] that they belong to, [M, C, R / C]."""
    return of.unflatten(1, (learned.shape[1], -1))


def _in_rows(samples: Samples, learned: Tensor) -> Samples:
    """Lay the decisions [M, C, ...] that are learned from out as rows [S, ...], in the order of time."""
    decision, row = learned.T.nonzero(as_tuple=True)
    return samples.each(lambda of: of[row, decision])
