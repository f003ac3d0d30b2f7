"""The outcome of a reward: a score, an abstention or an error. A failure is never represented by a number.

`RewardReport` summarizes a batch of them: scores, counts, examples of errors, and metrics.
"""

from __future__ import annotations

import json
import math
import reprlib
import textwrap
from collections import defaultdict
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
    """What a reward model reads in addition to the text of a response."""

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
        number = int.__int__(value)  # exact, also if a subclass overrides it
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
    """Convert a value to exactly str, not a subclass such as StrEnum."""
    return str.__str__(value) if isinstance(value, str) else str.__str__(str(value))


def _unwrapped(value: Any) -> Any:
    """Return the Python number in a NumPy scalar or a zero-dimensional array or tensor, without importing them."""
    return value.item() if getattr(value, "shape", None) == () else value


_SHOWN_ERRORS = 3
_SHOWN_TEXT = 400  # characters at the end of a response


@dataclass(frozen=True)
class ErrorSample:
    """A response without a score, and the error."""

    row: int
    request: RewardRequest
    error: RewardError

    def __str__(self) -> str:
        reply = self.request.solution_str
        lines = [
            f"row {self.row} ({self.request.data_source}): {self.error.message}",
            f"  ground truth: {self.request.ground_truth!r}",
            f"  response{' (its end)' if len(reply) > _SHOWN_TEXT else ''}: {reply[-_SHOWN_TEXT:]!r}",
        ]
        if self.error.traceback:
            lines.append(textwrap.indent(self.error.traceback.rstrip(), "  "))
        return "\n".join(lines)


@dataclass(frozen=True)
class RewardReport:
    """The rewards of one batch."""

    scores: list[float]
    """Score of each row; NaN if the reward abstained or failed."""
    num_scored: int
    num_abstained: int
    num_failed: int
    error_samples: tuple[ErrorSample, ...]
    """The first errors, for messages."""
    metrics: dict[str, float]
    """`reward/error_rate`, `reward/abstain_rate`, `reward/call_s/p50` and `p99`, and those of `extra_metrics`."""

    @property
    def error_rate(self) -> float:
        """Return the share of calls that failed."""
        return self.metrics["reward/error_rate"]


def summarize(
    requests: Sequence[RewardRequest], outcomes: Sequence[RewardOutcome], durations: Sequence[float]
) -> RewardReport:
    """Summarize the requests, outcomes and durations of a batch, which has at least one row."""
    rows = list(zip(requests, outcomes, strict=True))
    errors = [ErrorSample(row, request, o) for row, (request, o) in enumerate(rows) if isinstance(o, RewardError)]
    num_abstained = sum(isinstance(outcome, Abstention) for outcome in outcomes)
    metrics = {
        "reward/error_rate": len(errors) / len(rows),
        "reward/abstain_rate": num_abstained / len(rows),
        "reward/call_s/p50": percentile(durations, 50),
        "reward/call_s/p99": percentile(durations, 99),
    }
    metrics |= extra_metrics(outcomes)
    return RewardReport(
        scores=[outcome.value if isinstance(outcome, Score) else math.nan for outcome in outcomes],
        num_scored=len(rows) - len(errors) - num_abstained,
        num_abstained=num_abstained,
        num_failed=len(errors),
        error_samples=tuple(errors[:_SHOWN_ERRORS]),
        metrics=metrics,
    )


def extra_metrics(outcomes: Iterable[RewardOutcome]) -> dict[str, float]:
    """Return `reward/extra/<key>/mean` of each number that rewards returned in addition to the score.

    The mean is over the rows that have the key; `reward/extra/<key>/missing_fraction` is the share of scored rows
    without it, if there are any. True counts as 1, and values other than finite numbers are ignored.
    """
    scored = [outcome for outcome in outcomes if isinstance(outcome, Score)]
    values: dict[str, list[float]] = defaultdict(list)
    for outcome in scored:
        for key, value in outcome.extra.items():
            if isinstance(value, int | float) and math.isfinite(value):
                values[key].append(float(value))
    metrics: dict[str, float] = {}
    for key, numbers in sorted(values.items()):
        metrics[f"reward/extra/{key}/mean"] = sum(numbers) / len(numbers)
        if len(numbers) < len(scored):
            metrics[f"reward/extra/{key}/missing_fraction"] = 1 - len(numbers) / len(scored)
    return metrics


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of all values do not exceed (nearest rank)."""
    rank = max(math.ceil(percent / 100 * len(values)), 1)
    return sorted(values)[rank - 1]


def check_error_rate(report: RewardReport, max_error_rate: float) -> None:
    """Stop a run whose reward fails too often.

    Raises:
        RewardFailure: the share of failed calls is above `max_error_rate`; the message shows the first of them.
    """
    if report.error_rate <= max_error_rate:
        return
    shown = "\n".join(str(sample) for sample in report.error_samples)
    raise RewardFailure(
        f"{report.num_failed} of {len(report.scores)} rewards failed ({report.error_rate:.1%}; the limit is "
        f"{max_error_rate:.1%}). The first {len(report.error_samples)}:\n{shown}"
    )
