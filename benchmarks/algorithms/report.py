"""The table, as text, as a page of the documentation and as a picture."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.algorithms.cases import TOLERANCE, Case
from benchmarks.algorithms.tasks import Learned, Task, validation_answers
from tether.metrics.plot import COLORS, STYLE

CURVES = ("reference", "advantages", "policy loss", "aggregation", "off-policy", "critic", "control")
"""Groups with a chart."""


@dataclass(frozen=True)
class Row:
    """A case with what its seeds came to."""

    case: Case
    runs: Sequence[Learned]
    optima: Sequence[float] = ()
    """For each seed, where the case has a `beta`: the score that the best policy has."""

    @property
    def start(self) -> float:
        """Mean over seeds before training."""
        return sum(run.start for run in self.runs) / len(self.runs)

    @property
    def end(self) -> float:
        """Mean over seeds after training."""
        return sum(run.end for run in self.runs) / len(self.runs)

    @property
    def bound(self) -> str:
        """The demand of the case."""
        if self.case.beta is not None:
            return f"{sum(self.optima) / len(self.optima):.2f} ± {TOLERANCE}"
        return f"≥ {self.case.at_least}" if self.case.at_least is not None else f"≤ {self.case.at_most}"

    @property
    def passed(self) -> bool:
        """Whether every seed is within the bound."""
        ends = [run.end for run in self.runs]
        if self.case.beta is not None:
            return all(abs(end - best) <= TOLERANCE for end, best in zip(ends, self.optima, strict=True))
        low, high = self.case.at_least, self.case.at_most
        return all((low is None or end >= low) and (high is None or end <= high) for end in ends)

    def cells(self) -> list[str]:
        """Task, name, start, end of each seed, mean, bound, verdict, seconds of one run."""
        seeds = " ".join(f"{run.end:.2f}" for run in self.runs)
        seconds = sum(run.seconds for run in self.runs) / len(self.runs)
        verdict = "pass" if self.passed else "FAIL"
        task = self.case.task.name
        return [
            task,
            self.case.name,
            f"{self.start:.2f}",
            seeds,
            f"{self.end:.2f}",
            self.bound,
            verdict,
            f"{seconds:.1f}",
        ]


HEADER = ["task", "run", "start", "end, each seed", "mean", "bound", "", "s a run"]


def text_table(rows: Sequence[Row]) -> str:
    """Columns in line, a blank line between groups."""
    lines = [["", *HEADER], *([row.case.group, *row.cells()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def core_minutes(rows: Sequence[Row]) -> float:
    """Minutes of all runs together."""
    return sum(run.seconds for row in rows for run in row.runs) / 60


def markdown(rows: Sequence[Row]) -> str:
    """Every group a table, below the machine and the versions."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    processor = f"{platform.machine()}, Python {platform.python_version()}"
    parts = [
        f"`python -m benchmarks.algorithms`, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {processor}, {packages}: "
        f"{sum(len(row.runs) for row in rows)} runs in {core_minutes(rows):.0f} minutes of one core, "
        f"{sum(row.passed for row in rows)} of {len(rows)} rows pass.",
        *(questions(task) for task in {row.case.task.name: row.case.task for row in rows}.values()),
        f"![Curves of all runs](../assets/{PICTURE})",
    ]
    for group in dict.fromkeys(row.case.group for row in rows):
        members = [row for row in rows if row.case.group == group]
        parts.append(f"### {group[0].upper()}{group[1:]}")
        body = [f"| {' | '.join([*row.cells(), row.case.why])} |" for row in members]
        parts.append("\n".join([f"| {' | '.join([*HEADER, ''])} |", "|---" * (len(HEADER) + 1) + "|", *body]))
    return "\n\n".join(parts)


def questions(task: Task) -> str:
    """How many distinct questions a score is of."""
    count, answers = len(set(task.prompts)), validation_answers(task)
    return (
        f"`{task.name}` has {count} distinct questions, and a score is the mean over {answers} sampled answers to each."
        " Training asks the same questions: the table shows what is learned, not what carries over to others."
    )


PICTURE = "learning.png"


def draw(rows: Sequence[Row], path: Path) -> None:
    """A chart a group: the mean training score over seeds of every row."""
    groups = [group for group in CURVES if any(row.case.group == group for row in rows)]
    groups = [group for group in groups if group != "reference"]
    reference = next((row for row in rows if row.case.by_hand), None)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 3.4 * ((len(groups) + 2) // 3)), layout="constrained")
        axes = figure.subplots((len(groups) + 2) // 3, 3, squeeze=False).flatten()
        for axis in axes[len(groups) :]:
            axis.set_visible(False)
        for axis, group in zip(axes, groups, strict=False):
            axis.set_title(group, loc="left")
            members = [row for row in rows if row.case.group == group]
            for number, row in enumerate(members):
                style = "-" if number < len(COLORS) else "--"
                curve = _mean_curve(row)
                axis.plot(curve, style, color=COLORS[number % len(COLORS)], linewidth=1.2, label=row.case.name)
            if reference and group != "critic":
                axis.plot(_mean_curve(reference), ":", color="black", linewidth=1.4, label=reference.case.name)
            axis.legend(fontsize=6, ncols=2 if len(members) > 6 else 1)
            axis.set_xlabel("training step")
            axis.set_ylabel("mean score")
        figure.savefig(path, dpi=110, facecolor="white")


def _mean_curve(row: Row) -> np.ndarray:
    curves = np.mean([run.curve for run in row.runs], axis=0)
    window = np.ones(3) / 3
    return np.convolve(np.pad(curves, 1, mode="edge"), window, mode="valid")
