"""What a reward is: a score, an abstention or an error. It is never a number that stands for a failure."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeAlias

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


class RewardFailure(Exception):
    """Rewards failed more often than the run allows, or cannot be computed at all."""


@dataclass(frozen=True)
class RewardRequest:
    """One response to score: the arguments of a reward function."""

    data_source: str
    solution_str: str
    """The response as text."""
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """The function gave a finite number."""

    value: float
    extra: dict[str, Any] = field(default_factory=dict)
    """The other keys of a dict result, as plain Python values."""


@dataclass(frozen=True)
class Abstention:
    """The function returned None: it has no verdict on this response."""


@dataclass(frozen=True)
class RewardError:
    """There is no score, and why."""

    message: str
    traceback: str = ""
    """The end of the traceback, where there is one."""


RewardOutcome: TypeAlias = Score | Abstention | RewardError


def outcome_of(value: Any) -> RewardOutcome:
    """Read what a reward function returned.

    A number (int, float, bool, a zero-dimensional array or tensor) is a score, a dict is its "score" and extra keys,
    None is an abstention. Everything else is an error that shows the value.
    """
    if isinstance(value, dict):
        if "score" not in value:
            return RewardError(f'the reward function returned a dict without "score": {_SHORT.repr(value)}')
        extra = {str(key): plain(item) for key, item in value.items() if key != "score"}
        value = value["score"]
    else:
        extra = {}
    if value is None:
        return Abstention()
    number = _unwrapped(value)
    if not isinstance(number, Real):
        shown = f"{type(value).__name__} {_SHORT.repr(value)}"
        return RewardError(f'the reward function returned {shown}; return a number, a dict with "score", or None')
    if not math.isfinite(number):
        return RewardError(f"the reward function returned {float(number)}, which is no score")
    return Score(float(number), extra)


def plain(value: Any) -> Any:
    """`value` as Python numbers, strings, lists and dicts, which every process can read; other objects as text."""
    value = _unwrapped(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return float(value) if isinstance(value, Real) else _SHORT.repr(value)


def _unwrapped(value: Any) -> Any:
    """The Python number in a NumPy scalar or a zero-dimensional array or tensor (no need to import either library)."""
    return value.item() if getattr(value, "shape", None) == () else value
