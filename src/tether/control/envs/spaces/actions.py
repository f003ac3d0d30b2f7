"""Conversion between rows of a policy's actions and Gymnasium's action spaces."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from tether.control.envs.gymnasium_types import Raw, Space
from tether.control.envs.protocol import ActionSpec, ContinuousActions, DiscreteActions
from tether.observations import Array


@dataclass(frozen=True)
class ActionCodec:
    """Converts rows of a policy's actions to actions of a space."""

    spec: ActionSpec
    space: Space
    env_id: str

    @classmethod
    def of(cls, space: Space, env_id: str) -> ActionCodec:
        """Return the codec of an action space.

        Raises:
            ValueError: no policy supports this space.
        """
        match space:
            case spaces.Discrete():
                return cls(DiscreteActions((int(space.n),)), space, env_id)
            case spaces.MultiDiscrete():
                return cls(DiscreteActions(tuple(int(n) for n in space.nvec.reshape(-1))), space, env_id)
            case spaces.MultiBinary():
                return cls(DiscreteActions((2,) * int(np.prod(space.shape))), space, env_id)
            case spaces.Box() if np.issubdtype(space.dtype, np.floating):
                bounds = tuple(space.low.reshape(-1).tolist()), tuple(space.high.reshape(-1).tolist())
                return cls(ContinuousActions(int(np.prod(space.shape)), *bounds), space, env_id)
        raise ValueError(
            f"{env_id}: no policy acts in the action space {space}. Use Discrete, MultiDiscrete, MultiBinary, or a Box "
            "of floats."
        )

    def decode(self, actions: Array) -> Array:
        """Convert actions [N, width] to [N, *shape of the space], clipped to the bounds of a Box.

        Raises:
            ValueError: a value is not finite.
        """
        rows = len(actions)
        match self.space:
            case spaces.Discrete():
                return actions[:, 0] + self.space.start
            case spaces.MultiDiscrete():
                return actions.reshape(rows, *self.space.shape) + self.space.start
            case spaces.Box():
                check_finite(actions, self.env_id)
                shaped = actions.reshape(rows, *self.space.shape)
                # These two calls take a third of the time of np.clip, and this runs at each step.
                bounded = np.minimum(np.maximum(shaped, self.space.low), self.space.high)
                return bounded.astype(self.space.dtype, copy=False)
        return actions.reshape(rows, *self.space.shape or ()).astype(self.space.dtype)

    def encode(self, action: Raw) -> Array:
        """Return the row [width] that `decode` converts to this action.

        Raises:
            ValueError: the action has the wrong shape.
        """
        array = np.asarray(action)
        if array.shape != (self.space.shape or ()):
            raise ValueError(f"{self.env_id}: an action of shape {array.shape} is none of {self.space}")
        match self.space:
            case spaces.Discrete() | spaces.MultiDiscrete():
                return np.asarray(array - self.space.start, dtype=np.int64).reshape(-1)
            case spaces.Box():
                return array.astype(np.float32).reshape(-1)
        return array.astype(np.int64).reshape(-1)


def check_finite(actions: Array, env_id: str) -> None:
    """Refuse actions [N, width] with a value that is not finite, before they reach a simulator.

    Raises:
        ValueError: names environment and entry.
    """
    if math.isfinite(actions.sum()):  # several times as fast as checking each value
        return
    for n, entry in np.argwhere(~np.isfinite(actions)):
        raise ValueError(
            f"{env_id}: entry {entry} of the action for environment {n} is {actions[n, entry]}, and was not carried "
            "out. The policy has diverged: lower actor_rollout_ref.actor.optim.lr, or set "
            "actor_rollout_ref.actor.target_kl."
        )
