"""Environments that a simulator steps as one batch of tensors, for example on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from tether.control.envs.conversion import (
    FIX,
    ActionCodec,
    ObservationReader,
    described,
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


FINAL = ("final_obs", "final_observation")
"""Entries of the infos with the last observations of episodes, [N, ...], that have ended."""


class BatchedEnv:
    """Implements `VectorEnv` for a batched simulation: the step that ends an episode begins the next one.

    A simulation that resets itself either has the last observations of episodes in its infos (`FINAL`), or they are
    lost, as in IsaacLab. Then the observation before the last step takes their place: the return of a truncated episode
    is bootstrapped with the value of that one, as in rsl_rl.

    Args:
        id: name of the environment in error messages.
        env: the simulation, which is closed with this one.
        num_envs: number of environments in it.
        ignore_terminations: only truncation ends an episode.
        resets_itself: the simulation begins new episodes in the step that ends the old ones.
    """

    def __init__(
        self, id: str, env: Simulation, num_envs: int, *, ignore_terminations: bool = False, resets_itself: bool = False
    ) -> None:
        self.id, self.num_envs = id, num_envs
        self._env, self._resets_itself = env, resets_itself
        self._device = getattr(env.unwrapped, "device", "cpu")
        self._ignore_terminations = ignore_terminations
        self.spaces = env.unwrapped.single_observation_space, env.unwrapped.single_action_space
        self._read = ObservationReader(self.spaces[0], id)
        self._codec = ActionCodec.of(self.spaces[1], id)
        self.actions = self._codec.spec
        self.layout = self._read.layout

    def reset(self, seed: int) -> Observation:
        seeds = seed if self._resets_itself else [seed + i for i in range(self.num_envs)]
        obs, _ = read_reset(self._env.reset(seed=seeds), self.id)
        self._shown = self._seen(obs)
        return self._shown

    def step(self, actions: Array) -> EnvStep:
        stepped = self._env.step(_tensors(self._codec.decode(actions), self._device))
        raw, reward, terminated, truncated, info = read_step(stepped, self.id)
        ends, cut = self._flags(terminated, "`terminated`"), self._flags(truncated, "`truncated`")
        if self._ignore_terminations:
            ends = np.zeros_like(ends)
        # Copied first, because a reset may overwrite these tensors.
        obs, solved = self._seen(raw), info.get("success")
        rewards = read_rewards(_host(reward), self.id, self.num_envs).copy()
        success = None if solved is None else self._flags(solved, "info['success']")
        final_obs, over = None, np.flatnonzero(ends | cut)
        if over.size and self._resets_itself:
            last = next((info[name] for name in FINAL if name in info), None)
            final_obs = self._shown if last is None else self._seen(last)
        elif over.size:
            final_obs = obs
            fresh, _ = read_reset(self._env.reset(options={"env_idx": torch.as_tensor(over)}), self.id)
            obs = self._seen(fresh)
        self._shown = obs
        return EnvStep(obs, rewards, ends, cut, final_obs=final_obs, success=success)

    def get_state(self) -> EnvState:
        return EnvState(None, ("its simulation, which holds all environments in one",))

    def set_state(self, data: Saved) -> None:
        pass

    def close(self) -> None:
        self._env.close()

    def _seen(self, obs: Raw) -> Observation:
        try:
            return copied(self._read(_host(obs), self.num_envs))  # the simulator reuses its buffers
        except Exception as error:  # whatever is raised, the observations are not in the space
            raise ValueError(
                f"{self.id}: the observations {described(obs)} are not {self.num_envs} rows of {self.spaces[0]} "
                f"({error}). {FIX}"
            ) from error

    def _flags(self, flags: Raw, what: str) -> Flags:
        return read_flags(_host(flags), what, self.id, self.num_envs).copy()


def self_resetting(id: str, env: Simulation, num_envs: int) -> BatchedEnv:
    """Return the environments of a simulation that begins new episodes by itself, or does not if it says so.

    Its ``metadata["autoreset_mode"]`` of Gymnasium is SAME_STEP, the default here, or DISABLED.

    Raises:
        ValueError: it has another number of environments, another mode, or no spaces.
    """
    mode = AutoresetMode((getattr(env, "metadata", None) or {}).get("autoreset_mode", AutoresetMode.SAME_STEP))
    count = getattr(env.unwrapped, "num_envs", num_envs)
    if count != num_envs:
        raise ValueError(f"{id}: has {count} environments, not the {num_envs} that it was asked for. {FIX}")
    if mode is AutoresetMode.NEXT_STEP:
        raise ValueError(
            f"{id}: its metadata['autoreset_mode'] is NEXT_STEP; env_type=tensors takes SAME_STEP, DISABLED."
        )
    for name in ("single_observation_space", "single_action_space"):
        if not isinstance(space := getattr(env.unwrapped, name, None), Space):
            raise ValueError(f"{id}: its {name} is {space!r:.80}; expected a gymnasium.Space. {FIX}")
    return BatchedEnv(id, env, num_envs, resets_itself=mode is AutoresetMode.SAME_STEP)


def _tensors(actions: Raw, device: Raw) -> Raw:
    """Convert the arrays of actions to tensors on a device."""
    if isinstance(actions, dict):
        return {key: _tensors(part, device) for key, part in actions.items()}
    if isinstance(actions, tuple):
        return tuple(_tensors(part, device) for part in actions)
    return torch.as_tensor(actions, device=device)


def _host(value: Raw) -> Raw:
    """Convert the tensors in a nested dictionary to arrays."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        return {key: _host(inner) for key, inner in value.items()}
    return value
