"""Converts between the values of environments and typed arrays: observations, actions, rewards and flags.

Observations of Gymnasium's spaces become named arrays, and rows of a policy's actions become values of an action space.
Rewards and flags are checked, since NumPy would cast and broadcast them silently.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

import numpy as np
from gymnasium import spaces
from numpy.typing import DTypeLike

from tether.control.envs.gymnasium_types import Begun, Info, Raw, Space, Stepped
from tether.control.envs.protocol import (
    ActionSpec,
    ContinuousActions,
    DiscreteActions,
    Flags,
    Floats,
    MixedActions,
    choices_of,
)
from tether.observations import ACTION_MASK, TASK, Array, Observation, ObsPart, encode_text

FLAGS = (np.int8, np.uint8, np.bool_)
"""Dtypes of masks."""


class ObservationReader:
    """Converts observations of a space to named arrays, which `layout` describes.

    In the result, discrete values start at 0, images are [height, width, channels], texts are bytes, and floats are
    float32, in which networks compute; other dtypes are unchanged.

    Raises:
        ValueError: no policy supports a component of the space, or it has several texts.
    """

    def __init__(self, space: Space, env_id: str) -> None:
        self._space, self._env_id = space, env_id
        self._leaves = tuple(_leaves(space, (), env_id))
        self.layout = tuple(leaf.entry for leaf in self._leaves)
        if sum(entry.kind == "text" for entry in self.layout) > 1:
            raise ValueError(f"{env_id}: no policy reads several texts. Leave one in the observation space: {space}")
        is_vector = isinstance(space, spaces.Box) and not is_picture(space) and len(space.shape) == 1
        self.is_plain = is_vector and np.issubdtype(space.dtype, np.floating)
        """Whether observations are one flat vector of floats, which needs no conversion except to float32."""

    def __call__(self, obs: Raw, rows: int) -> Observation:
        """Read `rows` observations of the space.

        Raises:
            ValueError: the shape is wrong, a text is longer than its space allows, a discrete value is outside of the
                space, or values of an integer space are not integers.
        """
        return {leaf.entry.name: leaf.read(obs, rows) for leaf in self._leaves}

    def read_all(self, obs: Raw, rows: int) -> Observation:
        """Read the observations of all environments.

        Raises:
            ValueError: they are not in the space; the message names the environments.
        """
        try:
            return self(obs, rows)
        except Exception as error:  # whatever is raised, the observations are not in the space
            raise ValueError(
                f"{self._env_id}: the observations {describe_value(obs)} are not {rows} rows of {self._space} "
                f"({error}). {FIX}"
            ) from error

    def write(self, obs: Raw, into: Observation, row: int) -> None:
        """Read one observation into a row of arrays; raises as `__call__` does."""
        for leaf in self._leaves:
            into[leaf.entry.name][row] = leaf.read(obs, 1)[0]

    @property
    def fields(self) -> list[tuple[ObsPart, Space]]:
        """The fields of `layout`, and the space of each."""
        return [(leaf.entry, leaf.space) for leaf in self._leaves]

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
        if actual != (rows, *shape) and not (rows == 1 and actual == shape):  # reshaping would mix up the numbers
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
    """Convert numbers to a float dtype."""
    array = np.asarray(obs)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{array.dtype} is not a number that {np.dtype(dtype)} can hold")
    return array.astype(dtype, copy=False)


def _exactly(obs: Raw, dtype: DTypeLike) -> Array:
    """Convert to an integer dtype without changing a value."""
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
    """Whether a space has images: bytes in two to four dimensions."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and 2 <= len(space.shape) <= 4


def is_channels_first(shape: Sequence[int]) -> bool:
    """Whether the last three axes of an image are channels, height and width."""
    *_, first, second, third = shape
    return third > 4 and first < min(second, third)


def as_picture(pixels: Array) -> Array:
    """Convert images to [rows, height, width, channels].

    Accepts [rows, height, width], [rows, height, width, channels] and [rows, channels, height, width], which is assumed
    if the last axis is longer than 4 and the first one the shortest. The latter two may have an axis of stacked frames
    before, which become channels.
    """
    if pixels.ndim == 3:
        return pixels[..., None]
    if is_channels_first(pixels.shape):
        pixels = np.moveaxis(pixels, -3, -1)
    if pixels.ndim == 4:
        return pixels
    rows, frames, height, width, channels = pixels.shape
    return np.moveaxis(pixels, 1, 3).reshape(rows, height, width, frames * channels)


@dataclass(frozen=True)
class ActionCodec:
    """Converts rows of a policy's actions to actions of a space."""

    spec: ActionSpec
    space: Space
    env_id: str
    parts: Mapping[str | int, tuple[ActionCodec, list[int]]] = field(default_factory=dict)
    """For a Dict or Tuple: key -> codec of the subspace, and its columns of an action."""

    @classmethod
    def of(cls, space: Space, env_id: str) -> ActionCodec:
        """Return the codec of an action space.

        Raises:
            ValueError: no policy supports this space.
        """
        match space:
            case spaces.Dict() | spaces.Tuple() if space.spaces:
                return cls._of_parts(space, env_id)
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
            f"{env_id}: no policy acts in the action space {space}. Use Discrete, MultiDiscrete, MultiBinary, a Box of "
            "floats, or Dict and Tuple of these."
        )

    @classmethod
    def _of_parts(cls, space: spaces.Dict | spaces.Tuple, env_id: str) -> ActionCodec:
        named = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        codecs: dict[str | int, ActionCodec] = {key: cls.of(one, env_id) for key, one in named}
        choices = tuple(n for codec in codecs.values() for n in choices_of(codec.spec))
        numbers = [actions for codec in codecs.values() if (actions := _numbers_of(codec.spec)) is not None]
        continuous = ContinuousActions(
            sum(actions.width for actions in numbers),
            tuple(bound for actions in numbers for bound in actions.low),
            tuple(bound for actions in numbers for bound in actions.high),
        )
        parts, choice, number = {}, 0, len(choices)
        for key, codec in codecs.items():
            count = len(choices_of(codec.spec))
            others = codec.spec.width - count
            parts[key] = codec, [*range(choice, choice + count), *range(number, number + others)]
            choice, number = choice + count, number + others
        spec: ActionSpec = MixedActions(choices, continuous)
        if not choices or not numbers:
            spec = DiscreteActions(choices) if choices else continuous
        return cls(spec, space, env_id, parts)

    def decode(self, actions: Array) -> Raw:
        """Convert actions [N, width] to [N, *shape of the space], clipped to the bounds of a Box.

        Actions of a Dict or Tuple become a dict or tuple of arrays.

        Raises:
            ValueError: a value is not finite.
        """
        rows = len(actions)
        match self.space:
            case spaces.Dict():
                return {key: codec.decode(actions[:, columns]) for key, (codec, columns) in self.parts.items()}
            case spaces.Tuple():
                return tuple(codec.decode(actions[:, columns]) for codec, columns in self.parts.values())
            case spaces.Discrete():
                return actions[:, 0].astype(np.int64, copy=False) + self.space.start
            case spaces.MultiDiscrete():
                chosen = actions.astype(np.int64, copy=False).reshape(rows, *self.space.shape)
                return chosen + self.space.start
            case spaces.Box():
                check_finite(actions, self.env_id)
                shaped = actions.reshape(rows, *self.space.shape)
                # These two calls take a third of the time of np.clip, which matters at every step.
                bounded = np.minimum(np.maximum(shaped, self.space.low), self.space.high)
                return bounded.astype(self.space.dtype, copy=False)
        return actions.reshape(rows, *self.space.shape or ()).astype(self.space.dtype)

    def rows(self, decoded: Raw) -> Iterable[Raw]:
        """Split the result of `decode` into single actions."""
        match self.space:
            case spaces.Dict():
                by_part = [codec.rows(decoded[key]) for key, (codec, _) in self.parts.items()]
                return [dict(zip(self.parts, action, strict=True)) for action in zip(*by_part, strict=True)]
            case spaces.Tuple():
                by_part = [codec.rows(value) for (codec, _), value in zip(self.parts.values(), decoded, strict=True)]
                return list(zip(*by_part, strict=True))
        array: Array = decoded
        return array

    def encode(self, action: Raw) -> Array:
        """Return the row [width] that `decode` converts to this action.

        Raises:
            ValueError: the action has the wrong shape.
        """
        if self.parts:
            row = np.zeros(self.spec.width, np.int64 if isinstance(self.spec, DiscreteActions) else np.float32)
            for key, (codec, columns) in self.parts.items():
                row[columns] = codec.encode(action[key])
            return row
        array = np.asarray(action)
        if array.shape != (self.space.shape or ()):
            raise ValueError(f"{self.env_id}: an action of shape {array.shape} is none of {self.space}")
        match self.space:
            case spaces.Discrete() | spaces.MultiDiscrete():
                return np.asarray(array - self.space.start, dtype=np.int64).reshape(-1)
            case spaces.Box():
                return array.astype(np.float32).reshape(-1)
        return array.astype(np.int64).reshape(-1)


def _numbers_of(actions: ActionSpec) -> ContinuousActions | None:
    if isinstance(actions, DiscreteActions):
        return None
    return actions.numbers if isinstance(actions, MixedActions) else actions


def check_finite(actions: Array, env_id: str, first: int = 0) -> None:
    """Refuse actions [N, width] with a value that is not finite, before they reach a simulator.

    Raises:
        ValueError: a value is not finite; the message names environment and entry.
    """
    if math.isfinite(actions.sum()):  # several times as fast as checking every value
        return
    for n, entry in np.argwhere(~np.isfinite(actions)):
        raise ValueError(
            f"{env_id}: entry {entry} of the action for environment {first + n} is {actions[n, entry]}, and was not "
            "carried out. The policy has diverged: lower actor_rollout_ref.actor.optim.lr, or set "
            "actor_rollout_ref.actor.target_kl."
        )


FIX = "Correct the environment, or the wrapper that gives it."
_REWARDS = frozenset({float, int, np.float32, np.float64})
_FLAGS = frozenset({bool, np.bool_})


def check_methods(who: str, obj: object, *names: str) -> None:
    """Raise a ValueError if an object that a user's function returned lacks one of these methods."""
    if missing := [name for name in names if not callable(getattr(obj, name, None))]:
        raise ValueError(
            f"{who}: gives {type(obj).__name__} without {' and '.join(missing)}; expected environments with "
            f"{', '.join(names)}"
        )


def check_spaces(who: str, env: object, *names: str) -> None:
    """Raise a ValueError if one of these attributes of an environment is not a space."""
    for name in names:
        if not isinstance(space := getattr(env, name, None), spaces.Space):
            raise ValueError(f"{who}: its {name} is {space!r:.80}; expected a gymnasium.Space")


def is_standard_step(answer: object) -> bool:
    """Whether a step's result has the usual types, so that `convert_step` is not needed."""
    return (
        type(answer) is tuple
        and len(answer) == 5
        and type(answer[1]) in _REWARDS
        and type(answer[2]) in _FLAGS
        and type(answer[3]) in _FLAGS
        and type(answer[4]) is dict
    )


def convert_step(answer: object, who: str) -> Stepped:
    """Convert a step's result: reward and flags to Python values, and an info of None to an empty one.

    Raises:
        ValueError: the result is not (observation, reward, terminated, truncated, info).
    """
    obs, reward, terminated, truncated, info = read_step(answer, who)
    number = _unwrapped(reward)
    if not isinstance(number, Real):
        raise ValueError(f"{who}: the reward is {describe_value(reward)}, no number. {FIX}")
    ended = read_flag(terminated, "`terminated`", who), read_flag(truncated, "`truncated`", who)
    return obs, float(number), *ended, info


def read_step(answer: object, who: str) -> tuple[Raw, Raw, Raw, Raw, Info]:
    """Return the five values of a step unchanged, except that an info of None becomes an empty one.

    Raises:
        ValueError: the result is not (observation, reward, terminated, truncated, info).
    """
    if not isinstance(answer, tuple | list) or len(answer) != 5:
        wanted = "(observation, reward, terminated, truncated, info)"
        raise ValueError(f"{who}: a step gives {_counted(answer)}, not the five of Gymnasium, {wanted}. {FIX}")
    obs, reward, terminated, truncated, info = answer
    return obs, reward, terminated, truncated, _read_info(info, "a step", who)


def read_reset(answer: object, who: str) -> Begun:
    """Return the observation and the info of a reset.

    Raises:
        ValueError: the result is not (observation, info).
    """
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        wanted = "(observation, info)"
        raise ValueError(f"{who}: a reset gives {_counted(answer)}, not the two of Gymnasium, {wanted}. {FIX}")
    obs, info = answer
    return obs, _read_info(info, "a reset", who)


def _read_info(info: object, of: str, who: str) -> Info:
    if info is not None and not isinstance(info, Mapping):
        raise ValueError(f"{who}: the info of {of} is {describe_value(info)}, no dict. {FIX}")
    return dict(info or {})


def _counted(answer: object) -> str:
    return f"{len(answer)} values" if isinstance(answer, tuple | list) else describe_value(answer)


def read_flag(value: object, what: str, who: str) -> bool:
    """Convert a flag, which may be a number or a tensor, to a bool.

    Raises:
        ValueError: the flag is neither True, False, 1 nor 0.
    """
    number = _unwrapped(value)
    if not isinstance(number, Real) or number not in (0, 1):
        raise ValueError(f"{who}: {what} is {describe_value(value)}, neither True nor False. {FIX}")
    return bool(number)


def success_of(info: Info, who: str) -> bool | None:
    """Return ``is_success`` (Stable-Baselines3's name) or ``success`` from a step's info; None if it has neither.

    Raises:
        ValueError: the flag is neither True, False, 1 nor 0.
    """
    for name in ("is_success", "success"):
        if (flag := info.get(name)) is not None:
            return flag if type(flag) is bool else read_flag(flag, f"info[{name!r}]", who)
    return None


def read_flags(values: Raw, what: str, who: str, count: int) -> Flags:
    """Convert the flags [count] of a vector environment, which may be numbers, to bools.

    Raises:
        ValueError: the shape is wrong, or a flag is neither True, False, 1 nor 0.
    """
    flags = _host_array(values, what, who)
    if flags.shape != (count,):
        raise ValueError(
            f"{who}: {what} is {describe_value(values)}, not one flag for each of {count} environments. {FIX}"
        )
    if flags.dtype != np.bool_ and not np.isin(flags, (0, 1)).all():
        raise ValueError(f"{who}: {what} is {describe_value(values)}, neither True nor False in each place. {FIX}")
    return flags.astype(np.bool_, copy=False)


def read_rewards(values: Raw, who: str, count: int) -> Floats:
    """Return the rewards [count] of a vector environment as float32.

    Raises:
        ValueError: the shape is wrong, or the rewards are not numbers.
    """
    rewards = _host_array(values, "the reward", who)
    if rewards.shape != (count,) or rewards.dtype.kind not in "fiub":
        raise ValueError(
            f"{who}: the reward is {describe_value(values)}, not a number for each of {count} environments. {FIX}"
        )
    return rewards.astype(np.float32, copy=False)


def _host_array(values: Raw, what: str, who: str) -> Array:
    try:
        return np.asarray(values)
    except Exception as error:  # for example a tensor on a GPU
        raise ValueError(
            f"{who}: {what} is {describe_value(values)}, which NumPy cannot read ({error}). {FIX}"
        ) from error


def describe_value(value: object) -> str:
    """Return a short description of a value with its type or shape."""
    shape = getattr(value, "shape", None)
    return f"{reprlib.repr(value)} ({type(value).__name__}{f' of shape {tuple(shape)}' if shape else ''})"


def _unwrapped(value: object) -> object:
    """Return the Python number in a NumPy scalar or a zero-dimensional array or tensor; other values unchanged."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
