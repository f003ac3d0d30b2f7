"""Environments that a simulator steps as one batch of tensors, on a GPU for example."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from tether.envs.gymnasium_types import Begun, Info, Raw, Simulator
from tether.envs.protocol import EnvState, EnvStep, Flags, Saved
from tether.envs.spaces.actions import ActionCodec
from tether.envs.spaces.observations import ObservationReader
from tether.observations import Array, Observation, copied


class Simulation(Protocol):
    """N environments as ManiSkill steps them: every number is a tensor whose first axis is the environment."""

    @property
    def unwrapped(self) -> Simulator:
        """Has ``single_observation_space`` and ``single_action_space``."""
        ...

    def reset(self, *, seed: Raw = None, options: Info | None = None) -> Begun:
        """Begin new episodes everywhere, or in ``options["env_idx"]``; the observations are those of all."""
        ...

    def step(self, action: Raw) -> tuple[Raw, Raw, Raw, Raw, Info]:
        """Observations, rewards, terminations, truncations and infos; nothing is reset by itself."""
        ...

    def close(self) -> None:
        """Free what the simulator holds."""
        ...


class BatchedEnv:
    """Makes a `VectorEnv` of a batch: the step that ends episodes begins the next ones.

    Args:
        id: what error messages call the environment.
        env: the simulation, which is closed with this one.
        num_envs: how many environments it holds.
        ignore_terminations: only truncation ends an episode.
    """

    def __init__(self, id: str, env: Simulation, num_envs: int, *, ignore_terminations: bool = False) -> None:
        self.id, self.num_envs = id, num_envs
        self._env = env
        self._ignore_terminations = ignore_terminations
        self._read = ObservationReader(env.unwrapped.single_observation_space, id)
        self._codec = ActionCodec.of(env.unwrapped.single_action_space, id)
        self.actions = self._codec.spec
        self.layout = self._read.layout

    def reset(self, seed: int) -> Observation:
        """See `VectorEnv.reset`."""
        obs, _ = self._env.reset(seed=[seed + i for i in range(self.num_envs)])
        return self._seen(obs)

    def step(self, actions: Array) -> EnvStep:
        """See `VectorEnv.step`."""
        raw, reward, terminated, truncated, info = self._env.step(torch.as_tensor(self._codec.decode(actions)))
        ends, cut = self._flags(terminated), self._flags(truncated)
        if self._ignore_terminations:
            ends = np.zeros_like(ends)
        # Before environments are reset, which may write over these tensors.
        obs, told = self._seen(raw), info.get("success")
        rewards = np.array(_host(reward), dtype=np.float32).reshape(self.num_envs)
        success = None if told is None else self._flags(told)
        final_obs, over = None, np.flatnonzero(ends | cut)
        if over.size:
            final_obs = obs
            fresh, _ = self._env.reset(options={"env_idx": torch.as_tensor(over)})
            obs = self._seen(fresh)
        return EnvStep(obs, rewards, ends, cut, final_obs=final_obs, success=success)

    def get_state(self) -> EnvState:
        """See `VectorEnv.get_state`."""
        return EnvState(None, ("its simulation, which holds all environments in one",))

    def set_state(self, data: Saved) -> None:
        """See `VectorEnv.set_state`."""
        pass

    def close(self) -> None:
        """See `VectorEnv.close`."""
        self._env.close()

    def _seen(self, obs: Raw) -> Observation:
        return copied(self._read(_host(obs), self.num_envs))  # the simulator reuses its memory

    def _flags(self, told: Raw) -> Flags:
        return np.array(np.broadcast_to(np.asarray(_host(told), dtype=np.bool_), self.num_envs))


def _host(value: Raw) -> Raw:
    """Tensors in a nested dictionary as arrays."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, dict):
        return {key: _host(inner) for key, inner in value.items()}
    return value
