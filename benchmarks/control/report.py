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

Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def show(name: str, task: Task, results: Runs) -> None:
    """Print speeds and returns, and where tether's time goes."""
    console = Console()
    table = Table(title=f"{name}: {task.steps:,} steps, {task.num_envs} environments, same hyperparameters")
    for column in ("", "seeds", "steps a second", "return", "best", "worst", "tether is faster by"):
        table.add_column(column)
    speeds = {side: fmean(run["sps"] for run in runs) for side, runs in results.items()}
    for side, runs in results.items():
        returns = [run["return"] for run in runs]
        spread = f" ± {stdev(returns):.1f}" if len(returns) > 1 else ""
        ratio = f"{speeds['tether'] / speeds[side]:.2f}" if side != "tether" and "tether" in speeds else ""
        numbers = (f"{fmean(returns):.1f}{spread}", f"{max(returns):.1f}", f"{min(returns):.1f}", ratio)
        table.add_row(side, str(len(runs)), f"{speeds[side]:,.0f}", *numbers)
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
