"""Action masks: adds ``info["action_mask"]`` to the observations of an environment."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from tether.control.envs.conversion import ActionCodec
from tether.control.envs.gymnasium_types import Begun, Env, Info, Raw, Stepped, Wrapper
from tether.control.envs.protocol import choices_of
from tether.observations import ACTION_MASK, ObsLayout


class MaskedActions(Wrapper):
    """Adds the mask from the infos to the observation, as the entry ``action_mask`` of a Dict.

    Args:
        env: an environment whose infos contain ``action_mask``, with one flag per value of each discrete action. The
            mask may be missing in the last step of an episode.

    Raises:
        ValueError: the actions are not discrete.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        shown = env.observation_space
        self._is_dict = isinstance(shown, spaces.Dict)
        entries = dict(shown.spaces) if isinstance(shown, spaces.Dict) else {"state": shown}
        self._size = sum(_choices(env))
        if not self._size:
            raise ValueError(
                f"env.train.action_masks=true: the actions of {env} are numbers ({env.action_space}), and masks are of "
                "choices. Set false."
            )
        self.observation_space = spaces.Dict({**entries, ACTION_MASK: spaces.MultiBinary(self._size)})

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> Begun:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(obs, info, "a reset"), info

    def step(self, action: Raw) -> Stepped:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if (terminated or truncated) and ACTION_MASK not in info:
            info = info | {ACTION_MASK: np.ones(self._size, dtype=np.int8)}
        return self._with_mask(obs, info, "a step"), reward, terminated, truncated, info

    def _with_mask(self, obs: Raw, info: Info, of: str) -> Raw:
        if ACTION_MASK not in info:
            raise ValueError(
                f'env.train.action_masks=true: the info of {of} of {self.env} holds no "{ACTION_MASK}", but '
                f"{', '.join(info) or 'nothing'}. Set false, or have the environment tell it at every reset and step."
            )
        mask = _flat(info[ACTION_MASK])
        if mask.shape != (self._size,):
            raise ValueError(
                f'env.train.action_masks=true: info["{ACTION_MASK}"] of {of} of {self.env} has {mask.size} entries, '
                f"and its actions have {self._size} alternatives ({self.env.action_space})"
            )
        return {**(obs if self._is_dict else {"state": obs}), ACTION_MASK: mask}


def refuse_unread_mask(info: Info, layout: ObsLayout, env_id: str) -> None:
    """Refuse an environment whose masks would be ignored silently.

    Raises:
        ValueError: the info of a reset contains a mask, but the observations do not.
    """
    if ACTION_MASK in info and not any(entry.kind == "mask" for entry in layout):
        raise ValueError(
            f'env.train.action_masks: {env_id} tells which choices are allowed (info["{ACTION_MASK}"]). Set true to '
            "sample among these alone, or false to learn without. Environments that are stepped together have to give "
            f"the mask as the entry {ACTION_MASK} of a Dict observation."
        )


def _choices(env: Env) -> tuple[int, ...]:
    """Return the number of values of each discrete action; empty for continuous ones."""
    return choices_of(ActionCodec.of(env.action_space, str(env)).spec)


def _flat(mask: object) -> NDArray[np.int8]:
    """Return a flat mask, given one mask or a tuple with one per action, as for Gymnasium's ``sample``."""
    masks = mask if isinstance(mask, tuple | list) else [mask]
    return np.concatenate([np.asarray(each).astype(np.bool_).reshape(-1) for each in masks]).astype(np.int8)
