"""Summary of the rewards of a batch: scores, counts, examples of errors, and metrics."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tether.rewards.outcome import Abstention, RewardError, RewardFailure, RewardOutcome, RewardRequest, Score

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
