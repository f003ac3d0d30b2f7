"""Environments that a simulator steps as one batch of tensors, for example on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from tether.control.envs.action_masks import refuse_unread_mask
from tether.control.envs.conversion import (
    FIX,
    ActionCodec,
    ObservationReader,
    check_methods,
    check_spaces,
    describe_value,
    read_flags,
    read_reset,
    read_rewards,
    read_step,
)
from tether.control.envs.gymnasium_types import Begun, Info, Raw, Simulator
from tether.control.envs.protocol import EnvState, EnvStep, Flags, Saved
from tether.observations import Array, Observation, copied


class Simulation(Protocol):
    """N environments with ManiSkill's interface: all values are tensors whose first axis is the environments."""

    @property
    def unwrapped(self) -> Simulator:
        """The simulator without wrappers, which has ``single_observation_space`` and ``single_action_space``."""
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


MODES = (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)
FINAL = ("final_obs", "final_observation")
"""Keys of infos for the last observations [N, ...] of episodes that have ended."""


class BatchedEnv:
    """Implements `VectorEnv` for a batched simulation: the step that ends an episode begins the next one.

    A simulation that resets itself may return the last observations of episodes in its infos (`FINAL`). Otherwise they
    are lost, as in IsaacLab, and the observation before the last step replaces them: the return of a truncated episode
    is bootstrapped with its value, as in rsl_rl.

    A native PufferEnv is supported, too. It resets itself, overwrites its NumPy arrays, and has ``num_agents``, infos
    that are a list of logs, and ``masks`` of the agents that act. Steps of the other agents are not valid.

    Args:
        id: name of the environment in error messages.
        env: the simulation, which `close` closes.
        num_envs: number of environments in the simulation.
        ignore_terminations: only truncation ends an episode.
        resets_itself: the simulation begins new episodes in the step that ends the old ones.
    """

    def __init__(
        self, id: str, env: Simulation, num_envs: int, *, ignore_terminations: bool = False, resets_itself: bool = False
    ) -> None:
        self.id, self.num_envs = id, num_envs
        self._env, self._resets_itself = env, resets_itself
        simulator = _simulator(env)
        self._device = getattr(simulator, "device", "cpu")
        self._puffer = simulator if hasattr(simulator, "num_agents") and hasattr(simulator, "masks") else None
        self._acting, self._takes_tensors = np.ones(num_envs, dtype=np.bool_), True
        self._ignore_terminations = ignore_terminations
        self.spaces = simulator.single_observation_space, simulator.single_action_space
        self._read = ObservationReader(self.spaces[0], id)
        self._codec = ActionCodec.of(self.spaces[1], id)
        self.actions = self._codec.spec
        self.layout = self._read.layout

    def reset(self, seed: int) -> Observation:
        seeds = seed if self._resets_itself else [seed + i for i in range(self.num_envs)]
        obs, info = read_reset(self._without_logs(self._env.reset(seed=seeds)), self.id)
        refuse_unread_mask(info, self.layout, self.id)
        self._shown, self._takes_tensors = self._read_observation(obs), _has_tensors(obs)
        self._acting = self._acting_agents()
        return self._shown

    def step(self, actions: Array) -> EnvStep:
        decoded, acting = self._codec.decode(actions), self._acting
        stepped = self._env.step(_tensors(decoded, self._device) if self._takes_tensors else decoded)
        raw, reward, terminated, truncated, info = read_step(self._without_logs(stepped), self.id)
        ends, cut = self._flags(terminated, "`terminated`"), self._flags(truncated, "`truncated`")
        if self._ignore_terminations:
            ends = np.zeros_like(ends)
        # Values are copied now, because a reset may overwrite the tensors.
        obs, solved = self._read_observation(raw), info.get("success")
        rewards = read_rewards(self._on_host(reward, "the reward"), self.id, self.num_envs).copy()
        success = None if solved is None else self._flags(solved, "info['success']")
        final_obs, over = None, np.flatnonzero(ends | cut)
        if over.size and self._resets_itself:
            last = next((info[name] for name in FINAL if name in info), None)
            final_obs = self._shown if last is None else self._read_observation(last)
        elif over.size:
            final_obs = obs
            fresh, _ = read_reset(self._env.reset(options={"env_idx": torch.as_tensor(over)}), self.id)
            obs = self._read_observation(fresh)
        self._shown, self._acting = obs, self._acting_agents()
        valid = None if acting.all() else acting
        return EnvStep(obs, rewards, ends, cut, final_obs=final_obs, valid=valid, success=success)

    def get_state(self) -> EnvState:
        return EnvState(None, ("its simulation, which holds all environments in one",))

    def set_state(self, data: Saved) -> None:
        pass

    def close(self) -> None:
        self._env.close()

    def _read_observation(self, obs: Raw) -> Observation:
        # Copied, because the simulator reuses its buffers.
        return copied(self._read.read_all(self._on_host(obs, "the observation"), self.num_envs))

    def _flags(self, flags: Raw, what: str) -> Flags:
        return read_flags(self._on_host(flags, what), what, self.id, self.num_envs).copy()

    def _on_host(self, values: Raw, what: str) -> Raw:
        try:
            return _host(values)
        except Exception as error:  # of a device or dtype that NumPy does not support
            raise ValueError(f"{self.id}: {what} {describe_value(values)} cannot be read ({error}). {FIX}") from error

    def _without_logs(self, answer: Raw) -> Raw:
        """Return the result of a step or a reset with an empty info instead of a PufferEnv's list of logs."""
        if self._puffer is not None and isinstance(answer, tuple) and answer and isinstance(answer[-1], list):
            return *answer[:-1], {}
        return answer

    def _acting_agents(self) -> Flags:
        return self._acting if self._puffer is None else self._flags(self._puffer.masks, "`masks`")


def self_resetting(id: str, env: Simulation, num_envs: int) -> BatchedEnv:
    """Return the environments of a user's simulation, which resets itself unless its metadata say otherwise.

    ``metadata["autoreset_mode"]``, as in Gymnasium, is SAME_STEP (the default here) or DISABLED.

    Raises:
        ValueError: the simulation has a different number of environments, a different mode, no spaces, or lacks
            ``reset``, ``step`` or ``close``.
    """
    check_methods(id, env, "reset", "step", "close")
    simulator = _simulator(env)
    check_spaces(id, simulator, "single_observation_space", "single_action_space")
    count = getattr(simulator, "num_agents", getattr(simulator, "num_envs", num_envs))
    if count != num_envs:
        raise ValueError(f"{id}: has {count} environments, not the {num_envs} that it was asked for. {FIX}")
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode", AutoresetMode.SAME_STEP)
    if mode not in (*MODES, *(each.value for each in MODES)):
        raise ValueError(f"{id}: its metadata['autoreset_mode'] is {mode}; env_type=tensors takes SAME_STEP, DISABLED.")
    return BatchedEnv(id, env, num_envs, resets_itself=AutoresetMode(mode) is AutoresetMode.SAME_STEP)


def _simulator(env: Simulation) -> Simulator:
    """Return the simulator without wrappers."""
    return getattr(env, "unwrapped", env)


def _has_tensors(obs: Raw) -> bool:
    return any(map(_has_tensors, obs.values())) if isinstance(obs, Mapping) else isinstance(obs, torch.Tensor)


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
