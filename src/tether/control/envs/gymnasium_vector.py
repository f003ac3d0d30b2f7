"""Environments with their own vectorization: Gymnasium's `VectorEnv`, in any of its three autoreset modes."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from tether.control.envs.action_masks import refuse_unread_mask
from tether.control.envs.conversion import (
    FIX,
    ActionCodec,
    ObservationReader,
    describe_value,
    read_flags,
    read_reset,
    read_rewards,
    read_step,
)
from tether.control.envs.gymnasium_types import Info, Raw
from tether.control.envs.protocol import EnvState, EnvStep, Flags, Rollout, Saved
from tether.control.envs.state import EnvSnapshotter
from tether.observations import Array, Observation


class GymnasiumVectorEnv:
    """Implements `VectorEnv` for each of Gymnasium's autoreset modes.

    - ``SAME_STEP``: the step that ends an episode returns the first observation of the next episode, and its infos
      contain the last observation.
    - ``NEXT_STEP``: the step that ends an episode returns the last observation; the next step ignores its action and
      only resets, so it is marked as not valid.
    - ``DISABLED``: the caller has to reset, so `step` does it immediately.
    """

    def __init__(self, id: str, env: VectorEnv[Any, Any, Any]) -> None:
        self.id = id
        self.num_envs = env.num_envs
        self._env = env
        self._keeper = EnvSnapshotter([env])
        self._read = ObservationReader(env.single_observation_space, id)
        self._codec = ActionCodec.of(env.single_action_space, id)
        mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if mode not in {*AutoresetMode, *(each.value for each in AutoresetMode)}:
            names = ", ".join(map(str, AutoresetMode))
            raise ValueError(f"{id}: its metadata['autoreset_mode'] is {mode!r}, none of {names}. {FIX}")
        self._mode = AutoresetMode(mode)
        own: Raw = type(env)  # not attributes that a wrapper delegates, whose state would be left out
        self.rollout: Rollout | None = own.rollout.__get__(env) if hasattr(own, "rollout") else None
        if self.rollout is not None and self._mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"{id}: has a rollout(), which resets where an episode ends, and its metadata['autoreset_mode'] is "
                f"{env.metadata.get('autoreset_mode', 'missing, which means NEXT_STEP')}. Set it to "
                "gymnasium.vector.AutoresetMode.SAME_STEP, and let step() do the same."
            )
        self.actions = self._codec.spec
        self.layout = self._read.layout
        self.spaces = env.single_observation_space, env.single_action_space
        self._resetting = np.zeros(self.num_envs, dtype=np.bool_)

    def reset(self, seed: int | None) -> Observation:
        # With None, the generators of the environments continue.
        obs, info = read_reset(self._env.reset(seed=seed), self.id)
        refuse_unread_mask(info, self.layout, self.id)
        self._resetting = np.zeros(self.num_envs, dtype=np.bool_)
        return self._read.read_all(obs, self.num_envs)

    def step(self, actions: Array) -> EnvStep:
        stepped = self._env.step(self._codec.decode(actions))
        raw, rewards, terminations, truncations, infos = read_step(stepped, self.id)
        reward = read_rewards(rewards, self.id, self.num_envs)
        terminated = read_flags(terminations, "`terminated`", self.id, self.num_envs)
        truncated = read_flags(truncations, "`truncated`", self.id, self.num_envs)
        obs, ended = self._read.read_all(raw, self.num_envs), terminated | truncated
        final_obs, valid = None, None
        if self._mode is AutoresetMode.NEXT_STEP:
            self._refuse_reset_within_step(infos)
            if self._resetting.any():
                valid = ~self._resetting
                self._refuse_end_of_reset(ended)
            self._resetting = ended
        if ended.any():
            final_obs = self._final(infos, ended) if self._mode is AutoresetMode.SAME_STEP else obs
            if self._mode is AutoresetMode.DISABLED:
                fresh, _ = read_reset(self._env.reset(options={"reset_mask": ended}), self.id)
                # After a partial reset, only the masked rows are defined.
                begun = self._read.read_all(fresh, self.num_envs)
                obs = {name: _where(ended, begun[name], array) for name, array in obs.items()}
        success = self._success(infos)
        return EnvStep(obs, reward, terminated, truncated, final_obs=final_obs, valid=valid, success=success)

    def _refuse_end_of_reset(self, ended: Flags) -> None:
        """Refuse an environment that never resets, in which no further step would be valid."""
        if (self._resetting & ended).any():
            raise ValueError(
                f"{self.id}: environment {int(np.argmax(self._resetting & ended))} ends again in the step that resets "
                f"it, as NEXT_STEP means (metadata['autoreset_mode']). {FIX}"
            )

    def _refuse_reset_within_step(self, infos: Info) -> None:
        """Refuse an environment that resets in the same step but declares ``NEXT_STEP``.

        The first step of each episode would be lost, and truncation would bootstrap from the next episode's first
        state.

        Raises:
            ValueError: the infos contain the last observation of an episode, as only ``SAME_STEP`` requires.
        """
        for name in ("final_obs", "final_observation"):
            if name in infos:
                mode = self._env.metadata.get("autoreset_mode", "missing, which means NEXT_STEP")
                raise ValueError(
                    f"{self.id}: its metadata['autoreset_mode'] is {mode}, but info[{name!r}] says that an environment "
                    "resets in the step that ends its episode. Set it to gymnasium.vector.AutoresetMode.SAME_STEP, and "
                    "give the observations as info['final_obs']."
                )

    def _success(self, infos: Info) -> Flags | None:
        """Return the success of each environment; for episodes that have ended, ``final_info`` contains it."""
        for name in ("is_success", "success"):
            success = None
            for info in (infos, infos.get("final_info", {})):
                if name not in info:
                    continue
                everywhere = np.ones(self.num_envs, dtype=np.bool_)
                present = read_flags(info.get(f"_{name}", everywhere), f"info['_{name}']", self.id, self.num_envs)
                values = np.array(info[name])
                if values.shape == present.shape:
                    values[~present] = False
                flags = read_flags(values, f"info[{name!r}]", self.id, self.num_envs)
                success = flags if success is None else np.where(present, flags, success)
            if success is not None:
                return success
        return None

    def render(self) -> NDArray[np.uint8]:
        shown = self._env.render()
        if shown is None or not len(shown):
            raise ValueError(f"{self.id}: it shows no pictures (render_mode=rgb_array).")
        return np.asarray(shown[0])

    def get_state(self) -> EnvState:
        data, left_out = self._keeper.get()
        return EnvState((self._resetting, data), left_out)

    def set_state(self, data: Saved) -> None:
        resetting, envs = data
        self._keeper.set(envs)
        self._resetting = resetting

    def close(self) -> None:
        self._env.close()

    def _final(self, infos: Info, ended: Flags) -> Observation:
        """Return the last observations [N, ...] of the episodes that ended; other rows are zero."""
        if "final_obs" not in infos:
            raise ValueError(
                f"{self.id}: its metadata['autoreset_mode'] is SAME_STEP, but info['final_obs'] with the last "
                f"observations is missing. {FIX}"
            )
        final = self._read.zeros(self.num_envs)
        for i in np.flatnonzero(ended).tolist():
            try:
                self._read.write(infos["final_obs"][i], final, i)
            except Exception as error:  # any error means that the observation is not in the space
                raise ValueError(
                    f"{self.id}: info['final_obs'] is {describe_value(infos['final_obs'])}; expected an observation of "
                    f"{self.spaces[0]} for environment {i}, whose episode ended ({error}). {FIX}"
                ) from error
        return final


def _where(rows: Flags, chosen: Array, other: Array) -> Array:
    """Return the flagged rows [N, ...] from `chosen` and the others from `other`."""
    return np.where(rows.reshape(-1, *[1] * (other.ndim - 1)), chosen, other)
