"""Tables and a picture of the runs of all sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.control.tasks import Task
from benchmarks.resumable import write_between

LEARNING_MARKS = "<!-- learning:begin -->", "<!-- learning:end -->"
Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def show(name: str, task: Task, results: Runs) -> None:
    """Print speeds and returns, and where tether's time goes."""
    console = Console()
    table = Table(title=f"{name}: {task.steps:,} steps, {task.num_envs} environments, same hyperparameters")
    columns = ("", "seeds", "steps a second", "return", "best", "worst", "last episodes of training")
    for column in (*columns, "tether is ahead by (95%)", "in training (95%)", "faster by"):
        table.add_column(column)
    speeds = {side: fmean(run["sps"] for run in runs) for side, runs in results.items()}
    for side, runs in results.items():
        returns, training = of_tests(runs), of_training(runs)
        compared = ["", "", ""]
        if side != "tether" and "tether" in results:
            ours = results["tether"]
            ahead = [difference(of_tests(ours), returns), difference(of_training(ours), training)]
            compared = [f"{mean:.1f} ({low:.1f} to {high:.1f})" for mean, low, high in ahead]
            compared.append(f"{speeds['tether'] / speeds[side]:.2f}{_by_processor_time(ours, runs)}")
        numbers = (_spread(returns), f"{max(returns):.1f}", f"{min(returns):.1f}", _spread(training))
        table.add_row(side, str(len(runs)), f"{speeds[side]:,.0f}", *numbers, *compared)
    console.print(table)
    if "tether" not in results:
        return
    parts = {key: fmean(run["parts"][key] for run in results["tether"]) for key in results["tether"][0]["parts"]}
    rows = {
        "environments": parts["env"],
        "choosing actions": parts["gen"] - parts["env"],
        "values, advantages": parts["adv"],
        "update": parts["update_actor"],
    }
    table = Table(title="where tether's time goes")
    for column in ("", "ms a training step", "share"):
        table.add_column(column)
    for part, seconds in {**rows, "rest": parts["step"] - sum(rows.values()), "all": parts["step"]}.items():
        table.add_row(part, f"{1000 * seconds:.2f}", f"{seconds / parts['step']:.0%}")
    console.print(table)


def _by_processor_time(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> str:
    """The ratio of speeds that other jobs beside change little, where both sides were measured so."""
    if not all("cpu_sps" in run for run in (*ours, *theirs)):
        return ""
    ratio = fmean(run["cpu_sps"] for run in ours) / fmean(run["cpu_sps"] for run in theirs)
    return f" ({ratio:.2f} by processor time)"


def of_tests(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the return of each run in tests without noise."""
    return [run["return"] for run in runs]


def of_training(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the last point of each curve: returns with noise, over more episodes than a test; NaN before the first."""
    return [run["curve"][-1][1] if run["curve"] else float("nan") for run in runs]


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def difference(left: Sequence[float], right: Sequence[float]) -> tuple[float, float, float]:
    """Difference of two means and its 95% interval, by the percentile bootstrap over seeds (Efron 1979)."""
    rng = np.random.default_rng(0)
    means = [rng.choice(np.asarray(values, float), (10_000, len(values))).mean(1) for values in (left, right)]
    low, high = np.percentile(means[0] - means[1], (2.5, 97.5))
    return fmean(left) - fmean(right), float(low), float(high)


def thinned(curve: Sequence[Sequence[float]], points: int = 100) -> list[list[float]]:
    """A curve as the means of so many equal pieces."""
    pieces = np.array_split(np.asarray(curve, float), min(points, len(curve))) if curve else []
    return [[round(float(at), 1), round(float(got), 2)] for at, got in (piece.mean(0) for piece in pieces)]


def plot(results: Mapping[str, Runs], path: Path) -> None:
    """Draw the returns while training, a field per task: the mean of the seeds and their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(4.2 * len(results), 3.4), squeeze=False)
    for axis, (name, sides) in zip(axes[0], results.items(), strict=True):
        for side, runs in sides.items():
            last = min(run["curve"][-1][0] for run in runs)
            at = np.linspace(max(run["curve"][0][0] for run in runs), last, 100)
            curves = np.stack([np.interp(at, *np.asarray(run["curve"], float).T) for run in runs])
            (line,) = axis.plot(at, curves.mean(0), label=f"{side} ({len(runs)})")
            axis.fill_between(at, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.2)
        axis.set(title=name, xlabel="environment steps", ylabel="return while training")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write_table(path: Path, tasks: Mapping[str, Task], tables: Mapping[str, Runs]) -> None:
    """Put returns of tether and Stable-Baselines3 between the marks of a page.

    The last column is a ratio of steps per second of processor time, which other jobs beside change little.
    """
    rows = [
        "| | steps | seeds | tether | Stable-Baselines3 | tether is ahead by (95%) | in training (95%) | speed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, sides in tables.items():
        ours, theirs = sides["tether"], sides["sb3"]
        ahead = [difference(of(ours), of(theirs)) for of in (of_tests, of_training)]
        speed = fmean(run["cpu_sps"] for run in ours) / fmean(run["cpu_sps"] for run in theirs)
        several = min(len(ours), len(theirs)) > 2  # of two, the bootstrap knows next to nothing
        compared = [
            number(mean) + (f" ({number(low)} to {number(high)})" if several else "") for mean, low, high in ahead
        ]
        returns = [with_spread(of) for of in (of_tests(ours), of_tests(theirs))]
        seeds = f"{len(ours)}, {len(theirs)}"
        cells = (name, f"{tasks[name].steps:,}", seeds, *returns, *compared, f"{speed:.1f}")
        rows.append(f"| {' | '.join(cells)} |")
    write_between(path, *LEARNING_MARKS, "\n".join(rows))


def with_spread(values: Sequence[float]) -> str:
    """Return the mean, with the standard deviation if there are several values."""
    return number(fmean(values)) + (f" ± {number(stdev(values))}" if len(values) > 1 else "")


def number(value: float) -> str:
    """Return three digits or more."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
