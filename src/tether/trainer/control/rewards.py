"""Changes to the rewards of a simulator before anything learns from them."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.algorithms import RunningRewardNormalizer, discounted_sums
from tether.batch import EnvBatch
from tether.types import StateDict


class RelativeRewards:
    """Makes each reward its change since the step before; the first of an episode stays.

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self._last = torch.zeros(num_envs)

    def state_dict(self) -> StateDict:
        """The last reward of each episode that has not ended."""
        return {"last": self._last}

    def load_state_dict(self, state: StateDict) -> None:
        """Take over what `state_dict` gave; in other environments all episodes begin."""
        if state["last"].shape == self._last.shape:
            self._last = state["last"]

    def __call__(self, rewards: Tensor, starts: Tensor, ended: Tensor, valid: Tensor) -> Tensor:
        """The changes of the next rewards [N, T]; for the arguments see `RewardScaler`."""
        goes_on = torch.where(valid & ~ended, rewards, 0.0)  # 0 after an end, and after steps that did not happen
        last = torch.where(starts, 0.0, self._last)
        before = torch.cat([last[:, None], goes_on[:, :-1]], dim=1)
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
        self._before = torch.zeros(num_envs)

    def __call__(self, rewards: Tensor, starts: Tensor, ended: Tensor, valid: Tensor) -> Tensor:
        """Take the next rewards [N, T] into the statistics and scale them.

        Args:
            rewards: of each step.
            starts: [N]: the first step begins an episode.
            ended: the last step of each episode.
            valid: steps that happened.
        """
        starts = torch.cat([starts[:, None], ended[:, :-1]], dim=1)
        sums = discounted_sums(rewards * valid, starts, self._before, self._gamma)
        self._before = sums[:, -1].clone()
        self._statistics.update(sums.flatten(), valid.flatten())
        return (rewards / (self._statistics.std or 1.0)).clamp(-self._clip, self._clip)

    def state_dict(self) -> StateDict:
        """The statistics, and the sums of the episodes that have not ended."""
        return {"statistics": self._statistics.state_dict(), "before": self._before}

    def load_state_dict(self, state: StateDict) -> None:
        """Take over what `state_dict` gave; in other environments all episodes begin."""
        self._statistics.load_state_dict(state["statistics"])
        if state["before"].shape == self._before.shape:
            self._before = state["before"]


class EnvRewards:
    """All of it, over the rollouts of a training step; see `tether.trainer.protocol.RewardTransform`.

    Args:
        num_envs: N.
        coef: factor of every reward.
        relative: learn from changes of the reward.
        scaler: brings rewards to one scale.
    """

    def __init__(self, num_envs: int, *, coef: float, relative: bool, scaler: RewardScaler | None) -> None:
        self._num_envs, self._coef = num_envs, coef
        self._relative = RelativeRewards(num_envs) if relative else None
        self._scaler = scaler

    def apply(self, batch: EnvBatch) -> dict[str, float]:
        """Set `token_level_rewards` from `token_level_scores`; there are no metrics."""
        rewards, ended = batch.token_level_scores * self._coef, batch.terminated | batch.truncated
        parts = []
        for first in range(0, len(rewards), self._num_envs):
            rows = slice(first, first + self._num_envs)
            shaped = rewards[rows]
            for part in (self._relative, self._scaler):
                if part is not None:
                    shaped = part(shaped, batch.starts[rows, 0], ended[rows], batch.valid[rows])
            parts.append(shaped)
        batch.token_level_rewards = torch.cat(parts)
        return {}

    def state_dict(self) -> StateDict:
        """The state of each part."""
        parts = {"relative": self._relative, "scaler": self._scaler}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: StateDict) -> None:
        """Take over what `state_dict` gave; a part that is new begins without."""
        if self._relative and "relative" in state:
            self._relative.load_state_dict(state["relative"])
        if self._scaler and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])
