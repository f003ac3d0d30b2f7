"""What is done to the rewards of a simulator before anything learns from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tether.algorithms import RunningRewardNormalizer, discounted_sums
from tether.rollout.env.collector import EnvRollout


class RelativeRewards:
    """Makes each reward its change since the step before; the first of an episode stays.

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self.restart(num_envs)

    def restart(self, num_envs: int) -> None:
        """Begin new episodes everywhere."""
        self._last = torch.zeros(num_envs)

    def state_dict(self) -> dict[str, Any]:
        """The last reward of each episode that has not ended."""
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._last = state["last"]

    def __call__(self, rewards: Tensor, ended: Tensor, valid: Tensor) -> Tensor:
        """The changes of the next rewards [N, T]; for the arguments see `RewardScaler`."""
        goes_on = torch.where(valid & ~ended, rewards, 0.0)  # 0 after an end, and after steps that did not happen
        before = torch.cat([self._last[:, None], goes_on[:, :-1]], dim=1)
        self._last = goes_on[:, -1].clone()
        return rewards - before


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
        """The statistics, and the sums of the episodes that have not ended."""
        return {"statistics": self._statistics.state_dict(), "before": self._before, "ended": self._ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._statistics.load_state_dict(state["statistics"])
        self._before, self._ended = state["before"], state["ended"]


class RewardShaping:
    """All of it, over the rollouts of a training step.

    Args:
        num_envs: N.
        coef: factor of every reward.
        relative: learn from changes of the reward.
        scaler: brings rewards to one scale.
        fresh: every rollout begins new episodes.
    """

    def __init__(self, num_envs: int, *, coef: float, relative: bool, scaler: RewardScaler | None, fresh: bool) -> None:
        self._num_envs, self._coef, self._fresh = num_envs, coef, fresh
        self._relative = RelativeRewards(num_envs) if relative else None
        self._scaler = scaler

    def restart(self) -> None:
        """Begin new episodes everywhere."""
        for part in (self._relative, self._scaler):
            if part is not None:
                part.restart(self._num_envs)

    def __call__(self, rollout: EnvRollout) -> Tensor:
        """Rewards [M, T] to learn from."""
        rewards, valid = rollout.rewards * self._coef, rollout.valid
        ended = rollout.terminated | rollout.truncated
        parts = []
        for first in range(0, len(rewards), self._num_envs):
            piece = slice(first, first + self._num_envs)
            if self._fresh:
                self.restart()
            shaped = rewards[piece]
            for part in (self._relative, self._scaler):
                if part is not None:
                    shaped = part(shaped, ended[piece], valid[piece])
            parts.append(shaped)
        return torch.cat(parts)

    def state_dict(self) -> dict[str, Any]:
        """The state of each part."""
        parts = {"relative": self._relative, "scaler": self._scaler}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; a part that is new begins without."""
        if self._relative and "relative" in state:
            self._relative.load_state_dict(state["relative"])
        if self._scaler and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])
