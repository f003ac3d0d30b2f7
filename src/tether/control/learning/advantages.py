"""Computes advantages from the rewards of a rollout, and selects the decisions for the update.

A batch has M rows of T steps. At ``chunk_level`` the K steps of a chunk count as one step, with the sum of their
rewards, so that a row has R = C rewards instead of R = T.
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
    RunningRewardNormalizer,
    discounted_sums,
    episodic_gae,
    explained_variance,
    masked_sum,
    masked_whiten,
)
from tether.algorithms.aggregation import episode_weights
from tether.batch import EnvBatch, filled
from tether.config.schema import ActorConfig, AlgorithmConfig
from tether.control.envs.config import TrainEnvConfig
from tether.control.learning.losses import EPISODES_WEIGH_EQUALLY, Samples, aggregation_of, per_column, scale_factor
from tether.control.policies.config import PolicyConfig
from tether.control.policies.mlp_policy import Policy
from tether.control.policies.spec import Memory, numbers_of, with_numbers
from tether.metrics.data import group_metrics
from tether.types import StateDict


class RelativeRewards:
    """Replaces each reward with its change since the previous step; the first reward of an episode stays as it is.

    Args:
        num_envs: number of environments N.
    """

    def __init__(self, num_envs: int) -> None:
        self._last = torch.zeros(num_envs)

    def state_dict(self) -> StateDict:
        return {"last": self._last}

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned, unless the number of environments has changed."""
        if state["last"].shape == self._last.shape:
            self._last = state["last"]

    def __call__(self, rewards: Tensor, starts: Tensor, ended: Tensor, valid: Tensor) -> Tensor:
        """Return the changes of the next rewards [N, T]; arguments as for `RewardScaler`."""
        previous = torch.where(valid & ~ended, rewards, 0.0)  # 0 after an end, and after steps that were not executed
        last = torch.where(starts, 0.0, self._last)
        before = torch.cat([last[:, None], previous[:, :-1]], dim=1)
        self._last = previous[:, -1].clone()
        return rewards - before


class RewardScaler:
    """Divides rewards by the running standard deviation of the discounted return of an episode so far; clips them."""

    def __init__(self, num_envs: int, gamma: float, clip: float) -> None:
        self._gamma, self._clip = gamma, clip
        self._statistics = RunningRewardNormalizer()
        self._before = torch.zeros(num_envs)

    def __call__(self, rewards: Tensor, starts: Tensor, ended: Tensor, valid: Tensor) -> Tensor:
        """Add the next rewards [N, T] to the statistics and scale them.

        Args:
            rewards: reward of each step.
            starts: whether the first step begins an episode [N].
            ended: whether a step is the last of its episode.
            valid: whether a step was executed.
        """
        starts = torch.cat([starts[:, None], ended[:, :-1]], dim=1)
        sums = discounted_sums(rewards * valid, starts, self._before, self._gamma)
        self._before = sums[:, -1].clone()
        self._statistics.update(sums.flatten(), valid.flatten())
        return (rewards / (self._statistics.std or 1.0)).clamp(-self._clip, self._clip)

    def state_dict(self) -> StateDict:
        return {"statistics": self._statistics.state_dict(), "before": self._before}

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned, unless the number of environments has changed."""
        self._statistics.load_state_dict(state["statistics"])
        if state["before"].shape == self._before.shape:
            self._before = state["before"]


class EnvRewards:
    """Applies all transformations to the rollouts of a step, as a `tether.loop.protocol.RewardTransform`.

    Args:
        num_envs: number of environments N.
        coef: factor that multiplies every reward.
        relative: whether to replace rewards with their changes.
        scaler: scales the rewards.
    """

    def __init__(self, num_envs: int, *, coef: float, relative: bool, scaler: RewardScaler | None) -> None:
        self._num_envs, self._coef = num_envs, coef
        self._relative = RelativeRewards(num_envs) if relative else None
        self._scaler = scaler

    @classmethod
    def from_config(cls, train: TrainEnvConfig, policy: PolicyConfig, algorithm: AlgorithmConfig) -> EnvRewards:
        num_envs, scaler = train.total_num_envs, None
        if policy.normalize_rewards:
            scaler = RewardScaler(num_envs, algorithm.gamma, policy.clip_rewards)
        return cls(num_envs, coef=train.reward_coef, relative=train.use_rel_reward, scaler=scaler)

    def apply(self, batch: EnvBatch) -> dict[str, float]:
        """Set `token_level_rewards` from `token_level_scores`; return no metrics."""
        rewards, ended = batch.token_level_scores * self._coef, batch.terminated | batch.truncated
        transformed = []
        for first in range(0, len(rewards), self._num_envs):
            rows = slice(first, first + self._num_envs)
            shaped = rewards[rows]
            for transform in (self._relative, self._scaler):
                if transform is not None:
                    shaped = transform(shaped, batch.starts[rows, 0], ended[rows], batch.valid[rows])
            transformed.append(shaped)
        batch.token_level_rewards = torch.cat(transformed)
        return {}

    def state_dict(self) -> StateDict:
        transforms = {"relative": self._relative, "scaler": self._scaler}
        return {name: transform.state_dict() for name, transform in transforms.items() if transform is not None}

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned; a newly configured transformation starts without state."""
        if self._relative and "relative" in state:
            self._relative.load_state_dict(state["relative"])
        if self._scaler and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])


CRITIC = "gae"
"""The estimator that requires a critic."""


@dataclass(frozen=True)
class _Steps:
    """The inputs of the estimators, [M, R] each."""

    rewards: Tensor
    terminated: Tensor
    ended: Tensor
    valid: Tensor
    final_at: tuple[Tensor, Tensor]
    """Indices of the rows and steps that are bootstrapped."""


@dataclass(frozen=True)
class ControlAdvantages:
    """Sets `response_mask`, `advantages` and `returns` of a batch."""

    gamma: float
    lam: float
    estimator: str = CRITIC
    """A key of ``ADVANTAGE_ESTIMATORS``. All except gae treat a row as an episode that begins with the rollout."""
    estimator_options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of estimators other than gae."""
    normalize_advantages: bool = True
    """Whether gae normalises advantages to mean 0 and variance 1."""
    group_size: int = 1
    """The number of adjacent rows that begin in the same state."""
    reward_bounds: tuple[float, float] | None = None
    """Bounds of a group's mean episode reward; groups outside of them are not used."""
    reward_level: Literal["action_level", "chunk_level"] = "action_level"

    @classmethod
    def from_config(cls, algorithm: AlgorithmConfig, train: TrainEnvConfig) -> ControlAdvantages:
        bounds = algorithm.rewards_lower_bound, algorithm.rewards_upper_bound
        return cls(
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            estimator=algorithm.adv_estimator,
            estimator_options={"norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo},
            normalize_advantages=algorithm.normalize_advantages,
            group_size=train.group_size,
            reward_bounds=bounds if algorithm.filter_rewards else None,
            reward_level=algorithm.reward_type,
        )

    @torch.no_grad()
    def __call__(self, batch: EnvBatch) -> dict[str, float]:
        """Estimate the advantages and return metrics of the rollout.

        Args:
            batch: a batch with `token_level_rewards`, and with values if the estimator requires a critic.
        """
        mask, metrics = self._learned_steps(batch)
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

    def _learned_steps(self, batch: EnvBatch) -> tuple[Tensor, dict[str, float]]:
        """Return the mask [M, T] of the steps to learn from, and metrics of the groups of rows."""
        valid, lost = batch.valid, batch.truncated & ~batch.valid
        if self.estimator != CRITIC:  # an episode that was lost with its process has no score
            valid = valid & ~lost.any(dim=1, keepdim=True)
        elif batch.chunk > 1:  # an incomplete chunk has no next state to evaluate
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
        selected = (mean >= low) & (mean <= high)
        return valid & selected[:, None], metrics | {"group/kept_fraction": float(selected.float().mean())}

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
        """Return the values [M, R], if there is a critic, and the advantages."""
        count = steps.rewards.shape[1]
        if self.estimator != CRITIC:
            uid = torch.arange(len(steps.rewards)) // self.group_size
            estimator = ADVANTAGE_ESTIMATORS[self.estimator]
            return None, estimator(steps.rewards, steps.valid, uid=uid, gamma=self.gamma, **self.estimator_options)
        # The critic predicts one value per action of a chunk, so flattening puts the values in the order of time.
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
    """Selects the decisions to learn from, as rows, or as sequences for a recurrent policy."""

    has_memory: bool = False
    episode_length: float | None = None
    """The length at which an episode has weight 1; None gives all steps the same weight."""
    keep_observed: bool = False
    """Whether samples also contain the raw observations, for the policy's statistics."""

    @classmethod
    def from_config(cls, actor: ActorConfig, train: TrainEnvConfig, policy: Policy) -> LearnedDecisions:
        """Return the selection that the configured aggregation and the policy require."""
        episode_length = None
        if aggregation_of(actor, auto_reset=train.auto_reset) == EPISODES_WEIGH_EQUALLY:
            limit = train.max_episode_steps or train.max_steps_per_rollout_epoch
            episode_length = scale_factor(actor) or limit
        return cls(policy.state_width > 0, episode_length, keep_observed=policy.normalizer is not None)

    @torch.no_grad()
    def __call__(self, batch: EnvBatch, step: int) -> tuple[Samples, dict[str, float]]:
        """Return the samples of a batch that has advantages, and no metrics, as a `tether.loop.loop.SelectRows`."""
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
            advantages=per_column(_by_decision(advantages, learned), log_probs.shape[-1]),
            values=None if values is None else _by_decision(values, learned),
            returns=None if batch.returns is None else _by_decision(batch.returns, learned),
            mask=_by_decision(mask, learned) if batch.chunk > 1 else None,
            rollout_log_probs=batch.rollout_log_probs,
            weights=None if self.episode_length is None else self._episode_weights(mask, learned),
            observed=batch.obs[batch.carried_out] if self.keep_observed else None,
        )
        if self.has_memory:
            return self._in_sequences(samples, batch, learned), {}
        return _in_rows(samples, learned), {}

    def _in_sequences(self, samples: Samples, batch: EnvBatch, learned: Tensor) -> Samples:
        """Return the rows [M, C, ...] with at least one learned decision."""
        # Observations of other decisions are set to 0, so that they do not affect any gradient.
        numbers = torch.where(learned[..., None], numbers_of(samples.obs), 0.0)
        memory = Memory(batch.starts[:, :-1], batch.state, learned)
        selected = learned.any(dim=1)
        return replace(samples, obs=with_numbers(samples.obs, numbers), memory=memory).each(
            lambda values: values[selected]
        )

    def _episode_weights(self, valid: Tensor, learned: Tensor) -> Tensor:
        """Return the weight [M, C, 1] of each decision: `episode_length` divided by the steps of its row's episode."""
        # RLinf averages over all decisions, this loss over the executed ones; the weight corrects for their share.
        assert self.episode_length is not None
        weights = episode_weights(valid.sum(dim=1), self.episode_length) * learned.float().mean()
        return weights[:, None, None].expand(*learned.shape, 1)


def _by_decision(steps: Tensor, learned: Tensor) -> Tensor:
    """Group the steps [M, R] by their decisions [M, C], as [M, C, R / C]."""
    return steps.unflatten(1, (learned.shape[1], -1))


def _in_rows(samples: Samples, learned: Tensor) -> Samples:
    """Return the learned decisions of [M, C, ...] as rows [S, ...], in the order of time."""
    decision, row = learned.T.nonzero(as_tuple=True)
    return samples.each(lambda values: values[row, decision])
