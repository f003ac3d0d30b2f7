"""Transformations of the rewards of a simulator before the update."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.algorithms import RunningRewardNormalizer, discounted_sums
from tether.batch import EnvBatch
from tether.types import StateDict


class RelativeRewards:
    """Replaces each reward with its change since the previous step; the first of an episode remains.

    Args:
        num_envs: number of environments N.
    """

    def __init__(self, num_envs: int) -> None:
        self._last = torch.zeros(num_envs)

    def state_dict(self) -> StateDict:
        """Return the last reward of each unfinished episode."""
        return {"last": self._last}

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned, unless the number of environments has changed."""
        if state["last"].shape == self._last.shape:
            self._last = state["last"]

    def __call__(self, rewards: Tensor, starts: Tensor, ended: Tensor, valid: Tensor) -> Tensor:
        """Return the changes of the next rewards [N, T]; the arguments are those of `RewardScaler`."""
        previous = torch.where(valid & ~ended, rewards, 0.0)  # 0 after an end, and after steps that were not executed
        last = torch.where(starts, 0.0, self._last)
        before = torch.cat([last[:, None], previous[:, :-1]], dim=1)
        self._last = previous[:, -1].clone()
        return rewards - before


class RewardScaler:
    """Divides rewards by the running standard deviation of the discounted return of an episode so far.

    Args:
        num_envs: number of environments N.
        gamma: discount per step.
        clip: bound of the absolute value of the result.
    """

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
        """Return the statistics, and the sums of unfinished episodes."""
        return {"statistics": self._statistics.state_dict(), "before": self._before}

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned, unless the number of environments has changed."""
        self._statistics.load_state_dict(state["statistics"])
        if state["before"].shape == self._before.shape:
            self._before = state["before"]


class EnvRewards:
    """Applies all transformations to the rollouts of a step, as a `tether.trainer.protocol.RewardTransform`.

    Args:
        num_envs: number of environments N.
        coef: factor of every reward.
        relative: whether to replace rewards with their changes.
        scaler: scales the rewards.
    """

    def __init__(self, num_envs: int, *, coef: float, relative: bool, scaler: RewardScaler | None) -> None:
        self._num_envs, self._coef = num_envs, coef
        self._relative = RelativeRewards(num_envs) if relative else None
        self._scaler = scaler

    def apply(self, batch: EnvBatch) -> dict[str, float]:
        """Set `token_level_rewards` from `token_level_scores`, without metrics."""
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
        """Return the state of each transformation."""
        transforms = {"relative": self._relative, "scaler": self._scaler}
        return {name: transform.state_dict() for name, transform in transforms.items() if transform is not None}

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned; a transformation that is new has no state."""
        if self._relative and "relative" in state:
            self._relative.load_state_dict(state["relative"])
        if self._scaler and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])
