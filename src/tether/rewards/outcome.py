"""The outcome of a reward: a score, an abstention or an error. A failure is never represented by a number."""

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
"""Maximum length of an answer of a reward process, in bytes."""
_INTEGER_BITS = 1024  # more than any float has; converting far longer integers to text is slow
_MAX_DEPTH = 64
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


class RewardFailure(Exception):
    """Rewards failed more often than the run allows, or cannot be computed at all."""


@dataclass(frozen=True)
class Dialogue:
    """Inputs of a reward model besides the text of a response."""

    messages: Sequence[Message]
    """Messages before the response."""
    prompt_ids: Iterable[int]
    response_ids: Iterable[int] | None = None
    """Token ids as the policy sampled them; None: the response was not sampled."""


@dataclass(frozen=True)
class RewardRequest:
    """One response to score: the arguments of a reward function."""

    data_source: str
    solution_str: str
    """The response as text."""
    ground_truth: object
    extra_info: ExtraInfo = field(default_factory=dict)
    dialogue: Dialogue | None = field(default=None, compare=False, repr=False)
    """Conversation for reward models; functions do not receive it."""


@dataclass(frozen=True)
class Score:
    """A finite number from the reward."""

    value: float
    extra: ExtraInfo = field(default_factory=dict)
    """Other keys of a dict result, as plain Python values."""


@dataclass(frozen=True)
class Abstention:
    """The reward returned None: it does not score this response."""


@dataclass(frozen=True)
class RewardError:
    """The reason why there is no score."""

    message: str
    traceback: str = ""
    """End of the traceback, if there is one."""


RewardOutcome: TypeAlias = Score | Abstention | RewardError


def outcome_of(value: object) -> RewardOutcome:
    """Convert the result of a reward function to an outcome.

    A number (int, float, bool, a zero-dimensional array or tensor) is a score, a dict has the "score" and extra keys,
    and None is an abstention. Everything else is an error that shows the value.
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
        return RewardError(f"the reward function returned {plain(number)}; a score must be finite and fit into float32")
    return Score(float(number), extra)


def is_float32(number: Any) -> bool:
    """Return whether a number is finite in float32, the precision of scores."""
    return bool(-_FLOAT32_MAX <= number <= _FLOAT32_MAX)


def plain(value: object, depth: int = 0) -> Any:
    """Convert `value` to Python numbers, strings, lists and dicts for JSON; other objects become text."""
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
    """Serialize an outcome and the seconds of its call to JSON; an outcome that is too long becomes an error."""
    match outcome:
        case Score(value, extra):
            fields: list[object] = ["score", value, extra]
        case RewardError(message, traceback):
            fields = ["error", message, traceback]
        case Abstention():
            fields = ["abstention", "", ""]
    answer = json.dumps([*fields, seconds]).encode()
    if len(answer) > MAX_ANSWER:
        size = f"{len(answer) / 2**20:.0f} MiB; the limit is {MAX_ANSWER / 2**20:.0f} MiB"
        return dump_answer(RewardError(f"the reward function returned {size}"), seconds)
    return answer


def load_answer(answer: bytes) -> tuple[RewardOutcome, float]:
    """Parse the result of `dump_answer`.

    Raises:
        ValueError: `answer` is something else.
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
    """Convert a value to exactly str, also from a subclass such as StrEnum."""
    return str.__str__(value) if isinstance(value, str) else str.__str__(str(value))


def _unwrapped(value: Any) -> Any:
    """Return the Python number in a NumPy scalar or a zero-dimensional array or tensor, without importing them."""
    return value.item() if getattr(value, "shape", None) == () else value
