"""Gymnasium's observation spaces as named, typed arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces
from numpy.typing import DTypeLike

from tether.control.envs.gymnasium_types import Raw, Space
from tether.observations import ACTION_MASK, TASK, Array, Observation, ObsPart, encode_text

FLAGS = (np.int8, np.uint8, np.bool_)
"""dtypes of masks."""


class ObservationReader:
    """Converts observations of a space to named arrays, which `layout` describes.

    Discrete values start at 0, pictures are [height, width, channels], texts are bytes, and floats are float32, in
    which
    networks compute; other dtypes stay.

    Args:
        space: observation space of an environment.
        env_id: id for error messages.

    Raises:
        ValueError: no policy supports a component of the space, or there are several texts.
    """

    def __init__(self, space: Space, env_id: str) -> None:
        self._leaves = tuple(_leaves(space, (), env_id))
        self.layout = tuple(leaf.entry for leaf in self._leaves)
        if sum(entry.kind == "text" for entry in self.layout) > 1:
            raise ValueError(f"{env_id}: no policy reads several texts. Leave one in the observation space: {space}")
        is_vector = isinstance(space, spaces.Box) and not is_picture(space) and len(space.shape) == 1
        self.is_plain = is_vector and np.issubdtype(space.dtype, np.floating)
        """Whether observations are one flat vector of floats, which needs no conversion but to float32."""

    def __call__(self, obs: Raw, rows: int) -> Observation:
        """Read `rows` observations of the space.

        Raises:
            ValueError: the shape is another one, a text is longer than its space allows, a discrete value is outside
                of the space, or pixels or other integers are not integers.
        """
        return {leaf.entry.name: leaf.read(obs, rows) for leaf in self._leaves}

    def write(self, obs: Raw, into: Observation, row: int) -> None:
        """Read one observation into a row of arrays; raises as `__call__` does."""
        for leaf in self._leaves:
            into[leaf.entry.name][row] = leaf.read(obs, 1)[0]

    def zeros(self, rows: int) -> Observation:
        """Return zeroed arrays for `rows` observations."""
        return {entry.name: entry.zeros(rows) for entry in self.layout}


@dataclass(frozen=True)
class _Leaf:
    """A space that contains no other spaces."""

    keys: tuple[str | int, ...]
    """Path in a nested observation."""
    space: Space
    entry: ObsPart

    def read(self, obs: Raw, rows: int) -> Array:
        """Return this leaf's array [rows, *shape] of `rows` observations."""
        for key in self.keys:
            obs = obs[key]
        shape, actual = self.space.shape or (), np.shape(obs)
        if actual != (rows, *shape) and not (rows == 1 and actual == shape):  # a reshape would mix up numbers
            raise ValueError(f"{self.entry.name} has the shape {actual}, not {(rows, *shape)}")
        match self.space:
            case spaces.Text():
                longest = self.entry.shape[0]
                return np.stack([encode_text(text, longest) for text in np.asarray(obs).reshape(rows).tolist()])
            case spaces.Discrete() | spaces.MultiDiscrete():
                choices = _exactly(obs, np.int64).reshape(rows, *self.entry.shape) - np.reshape(self.space.start, -1)
                if not ((choices >= 0) & (choices < self.entry.choices)).all():
                    raise ValueError(f"{self.entry.name}: {obs!r:.80} is no choice of {self.space}")
                return choices
            case space if self.entry.kind == "image":
                return as_picture(_exactly(obs, np.uint8).reshape(rows, *(space.shape or ())))
        dtype = np.dtype(self.entry.dtype)
        numbers = _floats(obs, dtype) if dtype.kind == "f" else _exactly(obs, dtype)
        return numbers.reshape(rows, *self.entry.shape)


def _floats(obs: Raw, dtype: DTypeLike) -> Array:
    """Convert numbers to a float dtype.

    Raises:
        ValueError: they are no real numbers.
    """
    array = np.asarray(obs)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{array.dtype} is not a number that {np.dtype(dtype)} can hold")
    return array.astype(dtype, copy=False)


def _exactly(obs: Raw, dtype: DTypeLike) -> Array:
    """Convert to an integer dtype without changing a value.

    Raises:
        ValueError: the dtype cannot hold a value: a fraction, a pixel in [0, 1], or out of range.
    """
    array = np.asarray(obs)
    if np.can_cast(array.dtype, dtype):
        return array.astype(dtype, copy=False)
    with np.errstate(invalid="ignore"):
        cast = array.astype(dtype)
    if not (cast == array).all():
        raise ValueError(f"an observation of the type {array.dtype} has numbers that {np.dtype(dtype)} cannot hold")
    return cast


def _leaves(space: Space, keys: tuple[str | int, ...], env_id: str) -> Iterator[_Leaf]:
    name = ".".join(map(str, keys))
    match space:
        case spaces.MultiBinary() | spaces.Box() if name == ACTION_MASK and space.dtype in FLAGS:
            entry = ObsPart(ACTION_MASK, "mask", (int(np.prod(space.shape)),), "int8")
        case spaces.Dict() | spaces.Tuple():
            for key, inner in space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
                yield from _leaves(inner, (*keys, key), env_id)
            return
        case spaces.Text():
            entry = ObsPart(TASK, "text", (int(space.max_length),), "uint8")
        case spaces.Discrete():
            entry = ObsPart(name or "state", "vector", (1,), "int64", (int(space.n),))
        case spaces.MultiDiscrete():
            choices = tuple(int(n) for n in space.nvec.reshape(-1))
            entry = ObsPart(name or "state", "vector", (len(choices),), "int64", choices)
        case spaces.Box() if is_picture(space):
            shape = as_picture(np.zeros((1, *space.shape), dtype=np.uint8)).shape[1:]
            entry = ObsPart(name or "image", "image", shape, "uint8")
        case spaces.Box() | spaces.MultiBinary():
            dtype = "float32" if np.issubdtype(space.dtype, np.floating) else str(space.dtype)
            entry = ObsPart(name or "state", "vector", (int(np.prod(space.shape)),), dtype)
        case _:
            raise ValueError(
                f"{env_id}: no policy reads the observation space {space}. Use Box, Discrete, MultiDiscrete, "
                "MultiBinary, Text, or Dict and Tuple of these; or leave a part of a Dict out with "
                "env.train.drop_observations."
            )
    yield _Leaf(keys, space, entry)


def is_picture(space: Space) -> bool:
    """Whether a space is of bytes in two to four dimensions."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and 2 <= len(space.shape) <= 4


def as_picture(pixels: Array) -> Array:
    """Convert pictures to [rows, height, width, channels].

    Accepted are [rows, height, width], [rows, height, width, channels] and [rows, channels, height, width] (assumed if
    the
    last axis is longer than 4 and the first the shortest), and either with a stack of frames in front, which become
    channels.
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
