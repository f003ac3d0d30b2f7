"""Checks of the rewards and flags that environments return, which numpy would cast and broadcast silently."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from numbers import Real

import numpy as np

from tether.control.envs.gymnasium_types import Begun, Info, Raw, Stepped
from tether.control.envs.protocol import Flags, Floats
from tether.observations import Array

FIX = "Correct the environment, or the wrapper that gives it."
_REWARDS = frozenset({float, int, np.float32, np.float64})
_FLAGS = frozenset({bool, np.bool_})


def is_usual(answer: object) -> bool:
    """Whether a step's result has the usual types, so that `read_unusual` is not needed."""
    return (
        type(answer) is tuple
        and len(answer) == 5
        and type(answer[1]) in _REWARDS
        and type(answer[2]) in _FLAGS
        and type(answer[3]) in _FLAGS
        and type(answer[4]) is dict
    )


def read_unusual(answer: object, who: str) -> Stepped:
    """Convert a step's result: reward and flags to Python numbers, and an info of None to an empty one.

    Args:
        answer: result of `step`.
        who: the environment, for error messages.

    Raises:
        ValueError: the result is not (observation, reward, terminated, truncated, info).
    """
    obs, reward, terminated, truncated, info = read_step(answer, who)
    number = _unwrapped(reward)
    if not isinstance(number, Real):
        raise ValueError(f"{who}: the reward is {described(reward)}, no number. {FIX}")
    ended = read_flag(terminated, "`terminated`", who), read_flag(truncated, "`truncated`", who)
    return obs, float(number), *ended, info


def read_step(answer: object, who: str) -> tuple[Raw, Raw, Raw, Raw, Info]:
    """Return the five values of a step as they are, and an info of None as an empty one.

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
        raise ValueError(f"{who}: the info of {of} is {described(info)}, no dict. {FIX}")
    return dict(info or {})


def _counted(answer: object) -> str:
    return f"{len(answer)} values" if isinstance(answer, tuple | list) else described(answer)


def read_flag(value: object, what: str, who: str) -> bool:
    """Return a flag that may be a number or a tensor.

    Args:
        value: as the environment returns it.
        what: names the flag in messages.
        who: names the environment in messages.

    Raises:
        ValueError: the flag is neither True, False, 1 nor 0.
    """
    number = _unwrapped(value)
    if not isinstance(number, Real) or number not in (0, 1):
        raise ValueError(f"{who}: {what} is {described(value)}, neither True nor False. {FIX}")
    return bool(number)


def success_of(info: Info, who: str) -> bool | None:
    """Return the flag `is_success` (Stable-Baselines3's name) or `success` of a step's info, None without either.

    Raises:
        ValueError: the flag is neither True, False, 1 nor 0.
    """
    for name in ("is_success", "success"):
        if (flag := info.get(name)) is not None:
            return flag if type(flag) is bool else read_flag(flag, f"info[{name!r}]", who)
    return None


def read_flags(values: Raw, what: str, who: str, count: int) -> Flags:
    """Return the flags [count] of a vector environment, which may be numbers.

    Raises:
        ValueError: the shape is wrong, or a flag is neither True, False, 1 nor 0.
    """
    flags = _host_array(values, what, who)
    if flags.shape != (count,):
        raise ValueError(f"{who}: {what} is {described(values)}, not one flag for each of {count} environments. {FIX}")
    if flags.dtype != np.bool_ and not np.isin(flags, (0, 1)).all():
        raise ValueError(f"{who}: {what} is {described(values)}, neither True nor False in each place. {FIX}")
    return flags.astype(np.bool_, copy=False)


def read_rewards(values: Raw, who: str, count: int) -> Floats:
    """Return the rewards [count] of a vector environment as float32.

    Raises:
        ValueError: the shape is wrong, or the rewards are not numbers.
    """
    rewards = _host_array(values, "the reward", who)
    if rewards.shape != (count,) or rewards.dtype.kind not in "fiub":
        raise ValueError(
            f"{who}: the reward is {described(values)}, not a number for each of {count} environments. {FIX}"
        )
    return rewards.astype(np.float32, copy=False)


def _host_array(values: Raw, what: str, who: str) -> Array:
    try:
        return np.asarray(values)
    except Exception as error:  # for example a tensor on a GPU
        raise ValueError(f"{who}: {what} is {described(values)}, which NumPy cannot read ({error}). {FIX}") from error


def described(value: object) -> str:
    """Return a short description of a value with its type or shape."""
    shape = getattr(value, "shape", None)
    return f"{reprlib.repr(value)} ({type(value).__name__}{f' of shape {tuple(shape)}' if shape else ''})"


def _unwrapped(value: object) -> object:
    """Return the Python number in a NumPy scalar or a zero-dimensional array or tensor; other values unchanged."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
