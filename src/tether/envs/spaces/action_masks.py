"""Which choices are allowed now: ``info["action_mask"]`` of an environment as a part of its observations."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from tether.envs.gymnasium_types import Begun, Env, Info, Raw, Stepped, Wrapper
from tether.envs.protocol import DiscreteActions
from tether.envs.spaces.actions import ActionCodec
from tether.observations import ACTION_MASK, ObsLayout


class MaskedActions(Wrapper):
    """Shows the mask that the infos hold as the part ``action_mask`` of a Dict.

    Args:
        env: the infos of its resets and steps hold ``action_mask``: for each alternative of each choice whether it is
            allowed. That of a step that ends an episode may hold none.

    Raises:
        ValueError: its actions are no choices.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        shown = env.observation_space
        self._is_dict = isinstance(shown, spaces.Dict)
        parts = dict(shown.spaces) if isinstance(shown, spaces.Dict) else {"state": shown}
        self._size = sum(_choices(env))
        if not self._size:
            raise ValueError(
                f"env.train.action_masks=true: the actions of {env} are numbers ({env.action_space}), and masks are of "
                "choices. Set false."
            )
        self.observation_space = spaces.Dict({**parts, ACTION_MASK: spaces.MultiBinary(self._size)})

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> Begun:
        """See `gymnasium.Env.reset`."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(obs, info, "a reset"), info

    def step(self, action: Raw) -> Stepped:
        """See `gymnasium.Env.step`.

        Raises:
            ValueError: there is no mask, or not one of the actions.
        """
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
    """Refuse an environment whose masks would be ignored without a word.

    Raises:
        ValueError: the info of a reset holds one, and no part of the observations does.
    """
    if ACTION_MASK in info and not any(part.kind == "mask" for part in layout):
        raise ValueError(
            f'env.train.action_masks: {env_id} tells which choices are allowed (info["{ACTION_MASK}"]). Set true to '
            "sample among these alone, or false to learn without."
        )


def _choices(env: Env) -> tuple[int, ...]:
    """Alternatives of each choice; none where actions are numbers."""
    spec = ActionCodec.of(env.action_space, str(env)).spec
    return spec.choices if isinstance(spec, DiscreteActions) else ()


def _flat(mask: object) -> NDArray[np.int8]:
    """A mask, or one for each choice as Gymnasium's ``sample`` takes them, side by side."""
    parts = mask if isinstance(mask, tuple | list) else [mask]
    return np.concatenate([np.asarray(part).astype(np.bool_).reshape(-1) for part in parts]).astype(np.int8)
