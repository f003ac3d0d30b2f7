"""Summary of a batch of rewards: scores, counts, the errors themselves, and numbers to log."""

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
    """A response without a score, and why."""

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
    """One for each row; NaN where the reward abstained or failed."""
    num_scored: int
    num_abstained: int
    num_failed: int
    error_samples: tuple[ErrorSample, ...]
    """The first errors, to be shown."""
    metrics: dict[str, float]
    """`reward/error_rate`, `reward/abstain_rate`, `reward/call_s/p50` and `p99`, and those of `extra_metrics`."""

    @property
    def error_rate(self) -> float:
        """Failed calls as a share of all."""
        return self.metrics["reward/error_rate"]


def summarize(
    requests: Sequence[RewardRequest], outcomes: Sequence[RewardOutcome], durations: Sequence[float]
) -> RewardReport:
    """Sum up one batch, at least one row long: what was asked, what came back, and the seconds that each call took."""
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
    """Return `reward/extra/<key>/mean` of each number that rewards returned beside the score.

    It is over the rows that have the key; `reward/extra/<key>/missing_fraction` is the share of scored rows without it,
    where there are any. True counts as 1, and what is no finite number is left out.
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
    """The smallest value that at least `percent` of all values do not exceed (nearest rank)."""
    rank = max(math.ceil(percent / 100 * len(values)), 1)
    return sorted(values)[rank - 1]


def check_error_rate(report: RewardReport, max_error_rate: float) -> None:
    """Stop a run whose reward fails too often.

    Raises:
        RewardFailure: the share of failed calls is above `max_error_rate`; shows the first of them.
    """
    if report.error_rate <= max_error_rate:
        return
    shown = "\n".join(str(sample) for sample in report.error_samples)
    raise RewardFailure(
        f"{report.num_failed} of {len(report.scores)} rewards failed ({report.error_rate:.1%}; at most "
        f"{max_error_rate:.1%} may). The first {len(report.error_samples)}:\n{shown}"
    )
