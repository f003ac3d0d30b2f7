"""The outcome of a reward: a score, an abstention or an error, and never a number that stands for a failure."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeAlias

from tether.types import ExtraInfo, Message

_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
MAX_ANSWER = 1 << 24
"""Bytes of the longest answer that a reward process gives."""
_INTEGER_BITS = 1024  # more than any float has; the text of far longer ones takes long to write
_MAX_DEPTH = 64
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


class RewardFailure(Exception):
    """Rewards failed more often than the run allows, or cannot be computed at all."""


@dataclass(frozen=True)
class Dialogue:
    """Inputs of a reward model besides the text of a response."""

    messages: Sequence[Message]
    """Before the response."""
    prompt_ids: Iterable[int]
    response_ids: Iterable[int] | None = None
    """As the policy sampled them; None: it did not."""


@dataclass(frozen=True)
class RewardRequest:
    """One response to score: the arguments of a reward function."""

    data_source: str
    solution_str: str
    """The response as text."""
    ground_truth: object
    extra_info: ExtraInfo = field(default_factory=dict)
    dialogue: Dialogue | None = field(default=None, compare=False, repr=False)
    """For reward models; functions do not see it."""


@dataclass(frozen=True)
class Score:
    """The function gave a finite number."""

    value: float
    extra: ExtraInfo = field(default_factory=dict)
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


def outcome_of(value: object) -> RewardOutcome:
    """Read what a reward function returned.

    A number (int, float, bool, a zero-dimensional array or tensor) is a score, a dict is its "score" and extra keys,
    None is an abstention. Everything else is an error that shows the value.
    """
    if isinstance(value, dict):
        if "score" not in value:
            return RewardError(f'the reward function returned a dict without "score": {_SHORT.repr(value)}')
        extra = {_text(key): plain(item) for key, item in value.items() if key != "score"}
        value = value["score"]
    else:
        extra = {}
    if value is None:
        return Abstention()
    number = _unwrapped(value)
    if not isinstance(number, Real):
        shown = f"{type(value).__name__} {_SHORT.repr(value)}"
        return RewardError(f'the reward function returned {shown}; return a number, a dict with "score", or None')
    if not is_float32(number):
        return RewardError(
            f"the reward function returned {plain(number)}, which is no score: a score is finite and fits into float32"
        )
    return Score(float(number), extra)


def is_float32(number: Any) -> bool:
    """Whether a number is finite in float32, in which scores and components of rewards are computed."""
    return bool(-_FLOAT32_MAX <= number <= _FLOAT32_MAX)


def plain(value: object, depth: int = 0) -> Any:
    """`value` as exact Python numbers, strings, lists and dicts, which JSON can hold; other objects as text."""
    value = _unwrapped(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        number = int.__int__(value)  # exact, whatever a subclass overrides
        return number if number.bit_length() <= _INTEGER_BITS else f"an integer of {number.bit_length()} bits"
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, dict | list | tuple) and depth < _MAX_DEPTH:
        if isinstance(value, dict):
            return {_text(key): plain(item, depth + 1) for key, item in value.items()}
        return [plain(item, depth + 1) for item in value]
    return float(value) if isinstance(value, Real) else _SHORT.repr(value)


def dump_answer(outcome: RewardOutcome, seconds: float) -> bytes:
    """An outcome and the seconds of its call as JSON; an error in its place where it is too long."""
    match outcome:
        case Score(value, extra):
            fields: list[object] = ["score", value, extra]
        case RewardError(message, traceback):
            fields = ["error", message, traceback]
        case Abstention():
            fields = ["abstention", "", ""]
    answer = json.dumps([*fields, seconds]).encode()
    if len(answer) > MAX_ANSWER:
        size = f"{len(answer) / 2**20:.0f} MiB, and at most {MAX_ANSWER / 2**20:.0f} MiB are taken"
        return dump_answer(RewardError(f"the reward function returned {size}"), seconds)
    return answer


def load_answer(answer: bytes) -> tuple[RewardOutcome, float]:
    """Read `dump_answer`.

    Raises:
        ValueError: it is something else.
    """
    try:
        fields = json.loads(answer)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    match fields:
        case ["score", float(value), dict(extra), float(seconds)] if is_float32(value):
            return Score(value, extra), seconds
        case ["error", str(message), str(traceback), float(seconds)]:
            return RewardError(message, traceback), seconds
        case ["abstention", "", "", float(seconds)]:
            return Abstention(), seconds
    raise ValueError("not the answer of a reward process")


def _text(value: object) -> str:
    """Exactly a str, also of a subclass such as a StrEnum."""
    return str.__str__(value) if isinstance(value, str) else str.__str__(str(value))


def _unwrapped(value: Any) -> Any:
    """The Python number in a NumPy scalar or a zero-dimensional array or tensor (no need to import either library)."""
    return value.item() if getattr(value, "shape", None) == () else value
