"""Validation metrics over several samples per prompt: mean, best, worst and majority of n.

Each metric is computed per prompt, then averaged over the prompts of a data source. ``best@n``, ``worst@n`` and
``maj@n`` (n = 2, 4, 8, ... up to the N samples of a prompt) are bootstrap estimates: 1000 draws of n samples with
replacement, seed 42. Responses without a score are excluded and counted separately; a missing score never counts as 0.

Worked example: a prompt with rewards [1, 0] gives mean@2 = 0.5, std@2 = 0.5 (population) and best@2/mean near 0.75,
because one in four draws has the 0 twice.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
from numpy.typing import NDArray

NUM_DRAWS = 1000
SEED = 42

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ValidationRow:
    """One sampled response of the validation set."""

    data_source: str
    uid: Hashable
    """Identifies the prompt; all its responses have the same uid."""
    values: Mapping[str, object]
    """``reward``, and other values of the reward such as ``acc``. None, NaN and non-numeric values are excluded."""
    pred: Hashable | None = None
    """The answer parsed from the response; needed for ``maj@n``."""
    question: Hashable | None = None
    """Equal for rows with the same question; None: each prompt is its own question."""
    truth: Hashable | None = None
    """The reference answer, if there is one."""


def validation_metrics(rows: Iterable[ValidationRow]) -> dict[str, float]:
    """Compute ``val-core/<source>/<variable>/<metric>`` and the matching ``val-aux/...``.

    The core metrics measure a run: mean, best and maj over all N samples of a prompt, computed from ``acc`` if every
    scored row of the source has it, else from ``reward``. A mean over only the rows with ``acc`` would exclude those
    with a wrong format. All other metrics are aux; ``val-aux/<source>/<variable>/missing_fraction`` is the share of
    scored rows without a variable.
    """
    by_source: dict[str, dict[Hashable, list[ValidationRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_source[row.data_source][row.uid].append(row)
    metrics: dict[str, float] = {}
    for source, prompts in by_source.items():
        metrics |= _source_metrics(source, list(prompts.values()))
    return metrics


def _source_metrics(source: str, prompts: Sequence[Sequence[ValidationRow]]) -> dict[str, float]:
    collected: dict[tuple[str, str], list[float]] = defaultdict(list)
    for rows in prompts:
        for variable in sorted({name for row in rows for name in row.values}):
            for metric, value in prompt_metrics(rows, variable).items():
                collected[variable, metric].append(value)
    missing = _missing_fractions([row for rows in prompts for row in rows])
    core_variable = "acc" if missing.get("acc") == 0 else "reward"
    total = max(len(rows) for rows in prompts)
    core_metrics = {f"{kind}@{total}{moment}" for kind in ("mean", "best", "maj") for moment in ("", "/mean", "/std")}
    metrics = {}
    for (variable, metric), values in collected.items():
        core = variable == core_variable and metric in core_metrics
        metrics[f"val-{'core' if core else 'aux'}/{source}/{variable}/{metric}"] = math.fsum(values) / len(values)
    metrics |= {f"val-aux/{source}/{variable}/missing_fraction": share for variable, share in missing.items() if share}
    metrics |= _question_metrics(source, prompts, core_variable)
    unscored = sum(_number(row.values.get("reward")) is None for rows in prompts for row in rows)
    return metrics | {f"val-aux/{source}/num_unscored": float(unscored)}


def _missing_fractions(rows: Sequence[ValidationRow]) -> dict[str, float]:
    """Return the fraction of scored rows without a variable, for each variable that any of them has."""
    numbers = [{name for name, value in row.values.items() if _number(value) is not None} for row in rows]
    scored = [names for names in numbers if "reward" in names]
    return {
        variable: sum(variable not in names for names in scored) / len(scored)
        for variable in sorted(set().union(*scored))
    }


def _question_metrics(source: str, prompts: Sequence[Sequence[ValidationRow]], variable: str) -> dict[str, float]:
    """Return the score over distinct questions, and the score of always answering with the most frequent answer."""
    if any(rows[0].question is None for rows in prompts):
        return {}
    by_question: dict[Hashable, list[ValidationRow]] = defaultdict(list)
    for rows in prompts:
        by_question[rows[0].question] += rows
    values = [[_number(row.values.get(variable)) for row in rows] for rows in by_question.values()]
    means = [math.fsum(scored) / len(scored) for row in values if (scored := [v for v in row if v is not None])]
    metrics = {f"val-aux/{source}/num_distinct": float(len(by_question))}
    if means:
        metrics[f"val-aux/{source}/distinct_mean"] = math.fsum(means) / len(means)
    truths = [rows[0].truth for rows in by_question.values()]
    is_accuracy = {value for row in values for value in row} <= {0.0, 1.0, None}
    if None not in truths and is_accuracy:  # other rewards are not comparable to a fraction of questions
        most_frequent = max(Counter(truths).values())
        metrics[f"val-aux/{source}/majority_answer"] = most_frequent / len(truths)
    return metrics


def prompt_metrics(rows: Sequence[ValidationRow], variable: str) -> dict[str, float]:
    """Return the metrics of one variable over the N responses to one prompt, ``mean@N`` and so on.

    N counts all responses, so that a name means the same for every prompt; the statistics only include responses with a
    number. Empty if no response has one.
    """
    scored = [(number, row.pred) for row in rows if (number := _number(row.values.get(variable))) is not None]
    if not scored:
        return {}
    values = np.array([number for number, _ in scored])
    total = len(rows)
    metrics = {f"mean@{total}": float(values.mean())}
    if total == 1:
        return metrics
    metrics[f"std@{total}"] = float(values.std())
    votes = [pred for _, pred in scored]
    for n in _subset_sizes(total):
        metrics |= _moments(f"best@{n}", bootstrap(values, n, lambda draws: draws.max(axis=1)))
        metrics |= _moments(f"worst@{n}", bootstrap(values, n, lambda draws: draws.min(axis=1)))
        if None not in votes:
            positions = np.arange(len(values), dtype=np.float64)
            metrics |= _moments(f"maj@{n}", bootstrap(positions, n, lambda draws: _majority(draws, values, votes)))
    return metrics


def bootstrap(values: Floats, n: int, reduce: Callable[[Floats], Floats]) -> Floats:
    """Draw n of the values with replacement, 1000 times, and return each draw reduced to a number.

    Args:
        values: [K] values to draw from.
        n: size of a draw.
        reduce: [draws, n] -> [draws].

    Raises:
        ValueError: `values` is empty.
    """
    if not len(values):
        raise ValueError("bootstrap: no values to draw from; pass at least one")
    # The legacy generator is what verl uses, so the numbers agree.
    draws = np.random.RandomState(SEED).choice(values, size=(NUM_DRAWS, n), replace=True)
    return reduce(draws)


def majority_value(values: Sequence[float], votes: Sequence[Hashable]) -> float:
    """Return the value of the most frequent vote (that of its first voter); ties go to the earliest vote."""
    counts: dict[Hashable, int] = defaultdict(int)
    for vote in votes:
        counts[vote] += 1
    winner = max(counts, key=lambda vote: counts[vote])
    return values[list(votes).index(winner)]


def _majority(draws: Floats, values: Floats, votes: Sequence[Hashable]) -> Floats:
    chosen = draws.astype(int)
    return np.array([majority_value(values[draw].tolist(), [votes[i] for i in draw]) for draw in chosen])


def _moments(name: str, results: Floats) -> dict[str, float]:
    return {f"{name}/mean": float(results.mean()), f"{name}/std": float(results.std())}


def _subset_sizes(total: int) -> list[int]:
    """Return 2, 4, 8, ... below `total`, and `total` itself."""
    return [2**k for k in range(1, total.bit_length()) if 2**k < total] + [total]


def _number(value: object) -> float | None:
    if not isinstance(value, Real) or math.isnan(value):
        return None
    return float(value)
