"""Experience from simulators: T steps of N environments, in buffers that are allocated once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tether.envs.protocol import DiscreteActions, EnvStep, Floats, VectorEnv
from tether.rollout.episodes import Episode, EpisodeTracker

Act = Callable[[Floats, Floats | None], NDArray[Any]]
"""(observations [N, O], noise [N, ...] or None for the likeliest) -> actions [N, width]."""

Finals = list[tuple[int, int, Floats]]
"""(step, environment, last observation of its episode)."""


@dataclass(frozen=True)
class EnvRollout:
    """What T steps of N environments gave. The buffers are filled anew by the next rollout."""

    obs: Tensor
    """[T + 1, N, O]: before each step, and after the last."""
    actions: Tensor
    """[T, N, width]"""
    rewards: Tensor
    """[T, N]: as the environment gave them."""
    terminated: Tensor
    """[T, N]"""
    truncated: Tensor
    """[T, N]"""
    valid: Tensor
    """[T, N]: False where the step only began an episode."""
    final_obs: Tensor
    """[M, O]: last observations of the episodes whose end is bootstrapped."""
    final_at: tuple[Tensor, Tensor]
    """[M], [M]: step and environment of each."""
    episodes: tuple[Episode, ...]
    """Those that ended, in the order in which they did."""


class EnvCollector:
    """Steps environments with a policy; the next rollout goes on where the last one ended.

    Args:
        env: the environments.
        steps: T.
        bootstrap_terminations: keep the last observation of every episode, not only of truncated ones.
    """

    def __init__(self, env: VectorEnv, steps: int, *, bootstrap_terminations: bool = False) -> None:
        self.env = env
        self.steps = steps
        self._bootstrap_terminations = bootstrap_terminations
        shape = (steps, env.num_envs)
        whole = isinstance(env.actions, DiscreteActions)
        self._obs = torch.zeros(steps + 1, env.num_envs, env.obs_dim)
        self._actions = torch.zeros(*shape, env.actions.width, dtype=torch.int64 if whole else torch.float32)
        self._rewards = torch.zeros(shape)
        self._terminated = torch.zeros(shape, dtype=torch.bool)
        self._truncated = torch.zeros(shape, dtype=torch.bool)
        self._valid = torch.ones(shape, dtype=torch.bool)
        self._tracker = EpisodeTracker(env.num_envs)
        self._done = 0
        self.env_seconds = 0.0
        """Time in the environments' own code, of all rollouts so far."""

    def restart(self, seed: int) -> None:
        """Begin new episodes everywhere; what was unfinished is dropped."""
        self._obs[-1] = torch.from_numpy(self.env.reset(seed))
        self._tracker = EpisodeTracker(self.env.num_envs)

    def collect(self, act: Act, noise: Tensor) -> EnvRollout:
        """Step every environment T times.

        Args:
            act: the policy.
            noise: [T, N, ...], what `act` samples with.

        Raises:
            ValueError: an observation or a reward is not finite; names environment and step.
        """
        obs, actions, rewards = self._obs.numpy(), self._actions.numpy(), self._rewards.numpy()
        terminated, truncated, valid = self._terminated.numpy(), self._truncated.numpy(), self._valid.numpy()
        success = np.zeros(valid.shape, dtype=np.bool_)
        finals: Finals = []
        tells_success = False
        obs[0] = obs[-1]
        valid.fill(True)
        for t, row_noise in enumerate(noise.numpy()):
            actions[t] = act(obs[t], row_noise)
            step = self._step(actions[t], t)
            obs[t + 1], rewards[t] = step.obs, step.reward
            terminated[t], truncated[t] = step.terminated, step.truncated
            if step.valid is not None:
                valid[t] = step.valid
            if step.final_obs is not None:
                finals += [(t, n, step.final_obs[n].copy()) for n in self._bootstrapped(step)]
            if step.success is not None:
                tells_success, success[t] = True, step.success
        self._check(obs, rewards, finals)
        self._done += self.steps
        ended = terminated | truncated
        rows = np.array([row for _, _, row in finals], dtype=np.float32).reshape(-1, self.env.obs_dim)
        return EnvRollout(
            self._obs,
            self._actions,
            self._rewards,
            self._terminated,
            self._truncated,
            self._valid,
            torch.from_numpy(rows),
            (torch.tensor([t for t, _, _ in finals]).long(), torch.tensor([n for _, n, _ in finals]).long()),
            self._tracker.add(rewards, ended, valid, success if tells_success else None),
        )

    def _step(self, actions: NDArray[Any], t: int) -> EnvStep:
        start = time.perf_counter()
        try:
            step = self.env.step(actions)
        except Exception as error:
            error.add_note(f"raised by {self.env.id} at step {self._done + t + 1} of its environments")
            raise
        self.env_seconds += time.perf_counter() - start
        return step

    def _bootstrapped(self, step: EnvStep) -> list[int]:
        """Environments whose episode ended in a state that has a value."""
        cut = step.truncated & ~step.terminated
        if self._bootstrap_terminations:
            cut = step.truncated | step.terminated
        return np.flatnonzero(cut).tolist()

    def _check(self, obs: Floats, rewards: Floats, finals: Finals) -> None:
        bad = [(t, n, f"entry {entry} of the observation is {obs[t + 1, n, entry]}") for t, n, entry in _bad(obs[1:])]
        bad += [(t, n, f"the reward is {rewards[t, n]}") for t, n in _bad(rewards)]
        bad += [
            (t, n, f"entry {entry} of the last observation is {row[entry]}")
            for t, n, row in finals
            for (entry,) in _bad(row)
        ]
        if bad:
            t, n, what = min(bad)
            raise ValueError(
                f"{self.env.id}: {what} in environment {n} at step {self._done + t + 1}. "
                "Mend the environment, or end its episodes before it diverges."
            )


def _bad(values: Floats) -> list[list[int]]:
    """Where a number is not finite."""
    return np.argwhere(~np.isfinite(values)).tolist()
