"""From a rollout to samples to learn from: values, rewards on their scale, advantages, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether.algorithms import RunningRewardNormalizer, discounted_sums, episodic_gae, explained_variance, masked_whiten
from tether.models.control.policy import ControlPolicy
from tether.rollout.env import EnvRollout
from tether.training.control import Level, Samples, at_level


class RewardScaler:
    """Divides rewards by the running standard deviation of the discounted return of an episode so far.

    Args:
        num_envs: N.
        gamma: discount of a step.
        clip: bound of the result, both ways.
    """

    def __init__(self, num_envs: int, gamma: float, clip: float) -> None:
        self._gamma, self._clip = gamma, clip
        self._statistics = RunningRewardNormalizer()
        self.restart(num_envs)

    def restart(self, num_envs: int) -> None:
        """Begin new episodes everywhere; the statistics stay."""
        self._before = torch.zeros(num_envs)
        self._ended = torch.ones(num_envs, dtype=torch.bool)

    def __call__(self, rewards: Tensor, ended: Tensor, valid: Tensor) -> Tensor:
        """Take the next rewards [N, T] into the statistics and scale them.

        Args:
            rewards: of each step.
            ended: the last step of each episode.
            valid: steps that happened.
        """
        starts = torch.cat([self._ended[:, None], ended[:, :-1]], dim=1)
        sums = discounted_sums(rewards * valid, starts, self._before, self._gamma)
        self._before, self._ended = sums[:, -1].clone(), ended[:, -1].clone()
        self._statistics.update(sums.flatten(), valid.flatten())
        return (rewards / (self._statistics.std or 1.0)).clamp(-self._clip, self._clip)

    def state_dict(self) -> dict[str, Any]:
        """The statistics."""
        return self._statistics.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved statistics."""
        self._statistics.load_state_dict(state)


@dataclass(frozen=True)
class SampleOptions:
    """How a rollout becomes samples to learn from."""

    gamma: float
    lam: float
    reward_coef: float = 1.0
    normalize_advantages: bool = True
    logprob_level: Level = "action_level"


@torch.no_grad()
def make_samples(
    rollout: EnvRollout, policy: ControlPolicy, options: SampleOptions, scaler: RewardScaler | None
) -> tuple[Samples, dict[str, float]]:
    """Value what the policy saw, estimate advantages, and lay the valid steps out as rows.

    Log-probabilities and values come from one pass over the whole rollout: acting needs neither.

    Returns:
        The samples, and metrics of the rollout.
    """
    obs = policy.normalized(rollout.obs)
    values = policy.critic(obs.flatten(0, 1)).view(obs.shape[:2])
    next_values = values[1:].clone()
    next_values[rollout.terminated] = 0.0
    next_values[rollout.final_at] = policy.values(rollout.final_obs)
    ended, valid = (rollout.terminated | rollout.truncated).T, rollout.valid.T
    rewards = rollout.rewards.T * options.reward_coef
    if scaler:
        rewards = scaler(rewards, ended, valid)
    estimate = episodic_gae(rewards, values[:-1].T, next_values.T, ended, valid, gamma=options.gamma, lam=options.lam)
    advantages = masked_whiten(estimate.advantages, valid) if options.normalize_advantages else estimate.advantages
    rows = rollout.valid.flatten()
    flat_obs, actions = obs[:-1].flatten(0, 1)[rows], rollout.actions.flatten(0, 1)[rows]
    log_probs = at_level(policy.head.evaluate(policy.actor(flat_obs), actions).log_probs, options.logprob_level)
    samples = Samples(
        obs=flat_obs,
        actions=actions,
        old_log_probs=log_probs,
        advantages=advantages.T.flatten()[rows, None].expand_as(log_probs),
        values=values[:-1].flatten()[rows, None],
        returns=estimate.returns.T.flatten()[rows, None],
    )
    metrics = {
        "critic/rewards/mean": float(rewards[valid].mean()),
        "critic/returns/mean": float(samples.returns.mean()),
        "critic/values/mean": float(samples.values.mean()),
        "critic/vf_explained_var": float(explained_variance(values[:-1].T, estimate.returns, valid)),
    }
    return samples, metrics
