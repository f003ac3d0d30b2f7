"""Environments that a simulator steps as one batch of tensors, for example on a GPU."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from tether.control.envs.conversion import (
    ActionCodec,
    ObservationReader,
    read_flags,
    read_reset,
    read_rewards,
    read_step,
)
from tether.control.envs.gymnasium_types import Begun, Info, Raw, Simulator
from tether.control.envs.protocol import EnvState, EnvStep, Flags, Saved
from tether.observations import Array, Observation, copied


class Simulation(Protocol):
    """N environments with ManiSkill's interface: all values are tensors whose first axis is the environment."""

    @property
    def unwrapped(self) -> Simulator:
        """The simulator, which has ``single_observation_space`` and ``single_action_space``."""
        ...

    def reset(self, *, seed: Raw = None, options: Info | None = None) -> Begun:
        """Begin new episodes in all environments, or in ``options["env_idx"]``; return the observations of all."""
        ...

    def step(self, action: Raw) -> tuple[Raw, Raw, Raw, Raw, Info]:
        """Return observations, rewards, terminations, truncations and infos, without automatic reset."""
        ...

    def close(self) -> None:
        """Free the simulator's resources."""
        ...


class BatchedEnv:
    """Implements `VectorEnv` for a batched simulation: the step that ends an episode begins the next one.

    Args:
        id: name of the environment in error messages.
        env: the simulation, which is closed with this one.
        num_envs: number of environments in it.
        ignore_terminations: only truncation ends an episode.
    """

    def __init__(self, id: str, env: Simulation, num_envs: int, *, ignore_terminations: bool = False) -> None:
        self.id, self.num_envs = id, num_envs
        self._env = env
        self._ignore_terminations = ignore_terminations
        self.spaces = env.unwrapped.single_observation_space, env.unwrapped.single_action_space
        self._read = ObservationReader(self.spaces[0], id)
        self._codec = ActionCodec.of(self.spaces[1], id)
        self.actions = self._codec.spec
        self.layout = self._read.layout

    def reset(self, seed: int) -> Observation:
        obs, _ = read_reset(self._env.reset(seed=[seed + i for i in range(self.num_envs)]), self.id)
        return self._seen(obs)

    def step(self, actions: Array) -> EnvStep:
        stepped = self._env.step(torch.as_tensor(self._codec.decode(actions)))
        raw, reward, terminated, truncated, info = read_step(stepped, self.id)
        ends, cut = self._flags(terminated, "`terminated`"), self._flags(truncated, "`truncated`")
        if self._ignore_terminations:
            ends = np.zeros_like(ends)
        # Copied first, because a reset may overwrite these tensors.
        obs, solved = self._seen(raw), info.get("success")
        rewards = read_rewards(_host(reward), self.id, self.num_envs).copy()
        success = None if solved is None else self._flags(solved, "info['success']")
        final_obs, over = None, np.flatnonzero(ends | cut)
        if over.size:
            final_obs = obs
            fresh, _ = read_reset(self._env.reset(options={"env_idx": torch.as_tensor(over)}), self.id)
            obs = self._seen(fresh)
        return EnvStep(obs, rewards, ends, cut, final_obs=final_obs, success=success)

    def get_state(self) -> EnvState:
        return EnvState(None, ("its simulation, which holds all environments in one",))

    def set_state(self, data: Saved) -> None:
        pass

    def close(self) -> None:
        self._env.close()

    def _seen(self, obs: Raw) -> Observation:
        return copied(self._read(_host(obs), self.num_envs))  # the simulator reuses its buffers

    def _flags(self, flags: Raw, what: str) -> Flags:
        return read_flags(_host(flags), what, self.id, self.num_envs).copy()


def _host(value: Raw) -> Raw:
    """Convert the tensors in a nested dictionary to arrays."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, dict):
        return {key: _host(inner) for key, inner in value.items()}
    return value
