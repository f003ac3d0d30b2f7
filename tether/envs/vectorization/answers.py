"""Checks of rewards and flags that environments return, which numpy would cast and broadcast in silence."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from numbers import Real

import numpy as np

from tether.envs.gymnasium_types import Stepped

FIX = "Correct the environment, or the wrapper that gives it."
_REWARDS = frozenset({float, int, np.float32, np.float64})
_FLAGS = frozenset({bool, np.bool_})


def is_usual(answer: object) -> bool:
    """Whether an answer is what almost all environments give, so that `read_unusual` need not look at it."""
    return (
        type(answer) is tuple
        and len(answer) == 5
        and type(answer[1]) in _REWARDS
        and type(answer[2]) in _FLAGS
        and type(answer[3]) in _FLAGS
        and type(answer[4]) is dict
    )


def read_unusual(answer: object, who: str) -> Stepped:
    """An answer with its reward and flags as Python's numbers, and an empty info for None.

    Args:
        answer: of `step`.
        who: the environment, for messages.

    Raises:
        ValueError: it is not (observation, reward, terminated, truncated, info).
    """
    if not isinstance(answer, tuple | list) or len(answer) != 5:
        given = f"{len(answer)} values" if isinstance(answer, tuple | list) else described(answer)
        wanted = "(observation, reward, terminated, truncated, info)"
        raise ValueError(f"{who}: a step gives {given}, not the five of Gymnasium, {wanted}. {FIX}")
    obs, reward, terminated, truncated, info = answer
    if info is not None and not isinstance(info, Mapping):
        raise ValueError(f"{who}: the info of a step is {described(info)}, no dict. {FIX}")
    number = _unwrapped(reward)
    if not isinstance(number, Real):
        raise ValueError(f"{who}: the reward is {described(reward)}, no number. {FIX}")
    flags = []
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        value = _unwrapped(flag)
        if not isinstance(value, int) or value not in (0, 1):
            raise ValueError(f"{who}: `{name}` is {described(flag)}, neither True nor False. {FIX}")
        flags.append(bool(value))
    return obs, float(number), flags[0], flags[1], dict(info or {})


def described(value: object) -> str:
    """A value and its type or shape, short."""
    shape = getattr(value, "shape", None)
    return f"{reprlib.repr(value)} ({type(value).__name__}{f' of shape {tuple(shape)}' if shape else ''})"


def _unwrapped(value: object) -> object:
    """The Python number in a NumPy scalar or a zero-dimensional array or tensor."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
