"""Environments that step themselves as a vector: Gymnasium's `VectorEnv`, in any of its three autoreset modes."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from tether.envs.protocol import EnvState, EnvStep, Flags, Floats
from tether.envs.spaces.observation_layout import layout_of
from tether.envs.spaces.spaces import ActionCodec, flat_size, flatten
from tether.envs.state import EnvKeeper


class GymnasiumVectorEnv:
    """Brings the three ways of beginning anew to one.

    - ``SAME_STEP``: the step that ends an episode returns the first observation of the next one; the last of the old
      stands in the infos.
    - ``NEXT_STEP``: it returns the last observation; the following step ignores its action and only resets, so it is
      not valid.
    - ``DISABLED``: the caller resets, which is done here at once.

    Args:
        id: what error messages call the environment.
        env: the vector environment, which is closed with this one.
    """

    def __init__(self, id: str, env: VectorEnv[Any, Any, Any]) -> None:
        self.id = id
        self.num_envs = env.num_envs
        self._env = env
        self._keeper = EnvKeeper([env])
        self._space = env.single_observation_space
        self._codec = ActionCodec.of(env.single_action_space, id)
        self._mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self.actions = self._codec.spec
        self.obs_dim = flat_size(self._space, id)
        self.layout = layout_of(self._space, id)
        self._resetting = np.zeros(self.num_envs, dtype=np.bool_)

    def reset(self, seed: int | None) -> Floats:
        """See `VectorEnv.reset`; None leaves the generators of the environment as they are."""
        obs, _ = self._env.reset(seed=seed)
        self._resetting = np.zeros(self.num_envs, dtype=np.bool_)
        return self._flat(obs)

    def step(self, actions: NDArray[Any]) -> EnvStep:
        """See `VectorEnv.step`."""
        raw, reward, terminated, truncated, infos = self._env.step(self._codec.decode(actions))
        obs, ended = self._flat(raw), terminated | truncated
        final_obs, valid = None, None
        if self._mode is AutoresetMode.NEXT_STEP:
            if self._resetting.any():
                valid = ~self._resetting
            self._resetting = ended
        if ended.any():
            final_obs = self._final(infos, obs, ended) if self._mode is AutoresetMode.SAME_STEP else obs
            if self._mode is AutoresetMode.DISABLED:
                fresh, _ = self._env.reset(options={"reset_mask": ended})
                # Only the masked rows of what a partial reset returns are defined.
                obs = np.where(ended[:, None], self._flat(fresh), obs)
        reward = np.asarray(reward, dtype=np.float32)
        success = _success(infos)
        return EnvStep(obs, reward, terminated, truncated, final_obs=final_obs, valid=valid, success=success)

    def get_state(self) -> EnvState:
        """See `VectorEnv.get_state`."""
        data, left_out = self._keeper.get()
        return EnvState((self._resetting, data), left_out)

    def set_state(self, data: Any) -> None:
        """See `VectorEnv.set_state`."""
        resetting, envs = data
        self._keeper.set(envs)
        self._resetting = resetting

    def close(self) -> None:
        """See `VectorEnv.close`."""
        self._env.close()

    def _flat(self, obs: Any) -> Floats:
        return flatten(self._space, obs, self.num_envs)

    def _final(self, infos: dict[str, Any], obs: Floats, ended: Flags) -> Floats:
        """Rows of `final_obs` for the episodes that ended."""
        final = np.zeros_like(obs)
        for i in np.flatnonzero(ended):
            final[i] = flatten(self._space, infos["final_obs"][i], 1)[0]
        return final


def _success(infos: dict[str, Any]) -> Flags | None:
    """The success of each environment, where the infos tell; that of a finished episode stands in `final_info`."""
    for name in ("is_success", "success"):
        now, last = infos.get(name), infos.get("final_info", {}).get(name)
        if now is None and last is None:
            continue
        told = np.asarray(now if last is None else last).astype(np.bool_)
        if now is not None and last is not None:
            told = np.where(infos["final_info"][f"_{name}"], last, now).astype(np.bool_)
        return told
    return None
