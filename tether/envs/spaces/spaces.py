"""Gymnasium's spaces as flat observations and as columns of an action."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from tether.envs.protocol import ActionSpec, ContinuousActions, DiscreteActions, Floats


def flat_size(space: Space[Any], env_id: str) -> int:
    """Entries of a flat observation: choices count one for each alternative, texts one for each byte.

    Raises:
        ValueError: the space holds something that is no number.
    """
    match space:
        case spaces.Box() | spaces.MultiBinary():
            return int(np.prod(space.shape))
        case spaces.Discrete():
            return int(space.n)
        case spaces.Text():
            return int(space.max_length)
        case spaces.MultiDiscrete():
            return int(space.nvec.sum())
        case spaces.Dict():
            return sum(flat_size(inner, env_id) for inner in space.spaces.values())
        case spaces.Tuple():
            return sum(flat_size(inner, env_id) for inner in space.spaces)
    raise ValueError(
        f"{env_id}: no policy reads the observation space {space}. Use Box, Discrete, MultiDiscrete, MultiBinary, "
        "Text, or Dict and Tuple of these; or leave a part of a Dict out with env.train.drop_observations."
    )


def flatten(space: Space[Any], obs: Any, rows: int) -> Floats:
    """Lay `rows` observations of a space out as [rows, `flat_size`].

    Choices are one-hot, pictures [height, width, channels], and the parts of a Dict in its order.

    Raises:
        ValueError: a text is longer than its space allows.
    """
    match space:
        case spaces.Box() if is_picture(space):
            return as_picture(np.asarray(obs).reshape(rows, *space.shape)).astype(np.float32).reshape(rows, -1)
        case spaces.Text():
            return np.stack([text_codes(text, space.max_length) for text in np.asarray(obs).reshape(rows).tolist()])
        case spaces.Discrete():
            return _one_hot(np.asarray(obs).reshape(rows, 1) - space.start, [int(space.n)])
        case spaces.MultiDiscrete():
            starts = space.start.reshape(-1)
            return _one_hot(np.asarray(obs).reshape(rows, -1) - starts, space.nvec.reshape(-1).tolist())
        case spaces.Dict():
            return np.concatenate([flatten(inner, obs[key], rows) for key, inner in space.spaces.items()], axis=1)
        case spaces.Tuple():
            return np.concatenate([flatten(inner, obs[i], rows) for i, inner in enumerate(space.spaces)], axis=1)
    return np.asarray(obs, dtype=np.float32).reshape(rows, -1)


def is_picture(space: Space[Any]) -> bool:
    """Whether a space holds bytes in two to four dimensions."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and 2 <= len(space.shape) <= 4


def as_picture(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bring pictures to [rows, height, width, channels].

    They come as [rows, height, width]; as [rows, height, width, channels]; as [rows, channels, height, width], which is
    meant where the last axis is longer than 4 and the first the shortest; or with a stack of frames before either,
    which become channels.
    """
    if pixels.ndim == 3:
        return pixels[..., None]
    *_, first, second, third = pixels.shape
    if third > 4 and first < min(second, third):
        pixels = np.moveaxis(pixels, -3, -1)
    if pixels.ndim == 4:
        return pixels
    rows, frames, height, width, channels = pixels.shape
    return np.moveaxis(pixels, 1, 3).reshape(rows, height, width, frames * channels)


@dataclass(frozen=True)
class ActionCodec:
    """Turns rows of a policy's action into what a space takes."""

    spec: ActionSpec
    space: Space[Any]
    env_id: str

    @classmethod
    def of(cls, space: Space[Any], env_id: str) -> ActionCodec:
        """The codec of an action space.

        Raises:
            ValueError: no policy acts in this space.
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

    def decode(self, actions: NDArray[Any]) -> NDArray[Any]:
        """[N, width] -> [N, *shape of the space], clipped to the bounds of a Box.

        Raises:
            ValueError: a number is not finite, so that it never reaches a simulator.
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
                # The two calls cost a third of np.clip, and this runs once a step.
                bounded = np.minimum(np.maximum(shaped, self.space.low), self.space.high)
                return bounded.astype(self.space.dtype, copy=False)
        return actions.reshape(rows, *self.space.shape or ()).astype(self.space.dtype)

    def encode(self, action: Any) -> NDArray[Any]:
        """The row [width] that `decode` makes this action of the space from.

        Raises:
            ValueError: it is of another shape.
        """
        given = np.asarray(action)
        if given.shape != (self.space.shape or ()):
            raise ValueError(f"{self.env_id}: an action of shape {given.shape} is none of {self.space}")
        match self.space:
            case spaces.Discrete() | spaces.MultiDiscrete():
                return np.asarray(given - self.space.start, dtype=np.int64).reshape(-1)
            case spaces.Box():
                return given.astype(np.float32).reshape(-1)
        return given.astype(np.int64).reshape(-1)


def check_finite(actions: NDArray[Any], env_id: str) -> None:
    """Refuse actions [N, width] that hold a number that is not finite.

    Raises:
        ValueError: names environment and entry.
    """
    if math.isfinite(actions.sum()):  # several times as fast as looking at each
        return
    for n, entry in np.argwhere(~np.isfinite(actions)):
        raise ValueError(
            f"{env_id}: entry {entry} of the action for environment {n} is {actions[n, entry]}, and was not carried "
            "out. The policy has diverged: lower actor_rollout_ref.actor.optim.lr, or set "
            "actor_rollout_ref.actor.target_kl."
        )


def text_codes(text: str, size: int) -> Floats:
    """The bytes of a text as `size` numbers, zeros behind it.

    Raises:
        ValueError: it is longer.
    """
    codes = text.encode()
    if len(codes) > size:
        raise ValueError(f"the text {text!r} has {len(codes)} bytes, more than its space allows ({size})")
    return np.frombuffer(codes.ljust(size, b"\0"), dtype=np.uint8).astype(np.float32)


def _one_hot(numbers: NDArray[Any], choices: list[int]) -> Floats:
    """[rows, len(choices)] -> [rows, sum(choices)]."""
    out = np.zeros((len(numbers), sum(choices)), dtype=np.float32)
    starts = np.concatenate([[0], np.cumsum(choices)[:-1]])
    # put_along_axis takes four times as long.
    out[np.arange(len(numbers))[:, None], numbers.astype(np.int64) + starts] = 1.0
    return out
