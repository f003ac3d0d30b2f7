"""Draws the curves of one or several runs from their `metrics.jsonl`, as a page of small charts.

One run is drawn as thin values with a bold running mean; several runs each in their own colour, named in the legend.
With `mean`, for runs that only differ in their seed, each run is thin, and their mean over the steps that all have
reached is bold.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from tether.metrics.keys import describe
from tether.metrics.loggers.headline import validation_means
from tether.metrics.loggers.jsonl import read_metrics
from tether.metrics.names import distinct_names
from tether.spelling import did_you_mean

Run = dict[int, dict[str, float]]
"""Step -> key -> value."""
Floats = NDArray[np.float64]

COLORS = ("#2a6fbb", "#d1622b", "#2e8b57", "#8e5ea2", "#b8860b", "#4f9da6", "#c0504d", "#7f7f7f", "#a6761d")
LINES = ("-", "--", ":", "-.")
INK, FAINT = "#222222", "#8a8a8a"
STYLE: Any = {
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#b5b5b5",
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#ececec",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
OUTSIDE_STEP = {"timing_s/env", "timing_s/step", "timing_s/testing", "timing_s/save_checkpoint"}
"""Timings that are not part of `timing_s/step`."""
STEP_SECONDS = "timing_s/step"
SHORTEST_SHARE = 0.005
"""Phases below this fraction of a step are not drawn."""
SMOOTHED_FROM = 30
"""Minimum number of steps of a single run for a running mean."""


@dataclass(frozen=True)
class Panel:
    """One chart of keys that share a scale; with `log` the scale is logarithmic if all values are positive."""

    title: str
    unit: str
    keys: tuple[str, ...]
    labels: tuple[str, ...] = ("",)
    log: bool = False
    floor: float | None = None
    """Lower bound of the axis, because early outliers would hide the other values."""
    stacked: bool = False


PANELS = (
    Panel("Training score", "mean reward of a response", ("critic/score/mean",)),
    Panel("Loss of fine-tuning", "nats per token", ("train/loss", "val/loss"), ("training", "held out")),
    Panel("Return of an episode", "sum of rewards, mean", ("env/return", "eval/return"), ("training", "test")),
    Panel("Success", "share of episodes", ("env/success_once", "eval/success_once"), ("training", "test")),
    Panel("Length of an episode", "steps, mean", ("env/episode_len",)),
    Panel("KL to the reference", "nats per token", ("actor/reward_kl_penalty", "actor/kl_loss"), ("reward", "loss")),
    Panel("KL between policy and teacher", "nats per token", ("distillation/kl",)),
    Panel("KL of one step's update", "nats per token", ("actor/ppo_kl",)),
    Panel("Entropy of the policy", "nats per token", ("actor/entropy",)),
    Panel("Response length", "tokens, mean", ("response_length/mean",)),
    Panel("Explained variance of the critic", "1 is perfect", ("critic/vf_explained_var",), floor=-1.0),
    Panel("Policy loss", "clipped surrogate", ("actor/pg_loss",)),
    Panel("Value loss", "", ("critic/vf_loss",), log=True),
    Panel("Gradient norm", "before clipping", ("actor/grad_norm", "critic/grad_norm"), ("actor", "critic"), log=True),
)


def plot_run(
    run_dirs: Path | Sequence[Path],
    out_png: Path,
    keys: Sequence[str] | None = None,
    *,
    mean: bool = False,
    title: str | None = None,
) -> Path:
    """Draw the curves of one or several runs.

    Args:
        run_dirs: folders with a `metrics.jsonl`.
        out_png: file to write; other suffixes that matplotlib knows (.svg, .pdf) work too.
        keys: metrics to draw, one chart each; None: the metrics that summarise a run.
        mean: whether the runs are repetitions of one experiment, whose mean is drawn.
        title: title of the page; None: the names of the folders.

    Returns:
        `out_png`.

    Raises:
        ValueError: a folder has no metrics, no run has a key, or the picture cannot be written.
    """
    folders = [run_dirs] if isinstance(run_dirs, Path) else list(run_dirs)
    runs = [read_metrics(folder) for folder in folders]
    logged = {key for run in runs for record in run.values() for key in record}
    if not logged:
        raise ValueError(f"{', '.join(map(str, folders))}: no step was logged yet; plot again later")
    by_env_steps = "perf/env_steps" in logged and all(map(_counts_env_steps, runs))
    if by_env_steps:
        runs = [{int(record.get("perf/env_steps", 0)): record for record in run.values()} for run in runs]
    panels = _default_panels(runs, logged)
    if keys is not None:
        panels = [_panel_of(key, panels, logged) for key in keys]
    with mpl.rc_context(STYLE):
        names = distinct_names(folders)
        figure = _draw(panels, runs, [] if mean or len(runs) == 1 else names, title or ", ".join(names), by_env_steps)
        try:
            figure.savefig(out_png, dpi=150, facecolor="white")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ValueError(
                f"{out_png}: cannot be written ({why}). Give another file, for example curves.png"
            ) from error
    return out_png


def _counts_env_steps(run: Run) -> bool:
    """Return whether every training step logs the total number of environment steps so far."""
    return all(step == 0 or "perf/env_steps" in record for step, record in run.items())


def _default_panels(runs: Sequence[Run], logged: set[str]) -> list[Panel]:
    validation = sorted({key for run in runs for record in run.values() for key in validation_means(record)})
    names = tuple(key.removeprefix("val-core/") for key in validation)
    timings = _phases(runs, logged)
    score, *others = PANELS
    if "perf/env_steps" in logged:
        others = [replace(panel, unit=panel.unit.replace("per token", "per action")) for panel in others]
    panels = [
        score,
        Panel("Validation score", names[0] if len(names) == 1 else "", tuple(validation), names),
        *others,
        Panel("Time of a step", "seconds", tuple(timings), tuple(k.split("/")[1] for k in timings), stacked=True),
    ]
    return [panel for panel in panels if logged & set(panel.keys)]


def _phases(runs: Sequence[Run], logged: set[str]) -> list[str]:
    """Return the keys of the phases of a step, the longest first, without phases too short to be visible."""
    phases = {key for key in logged if key.startswith("timing_s/") and key.count("/") == 1} - OUTSIDE_STEP
    seconds = {key: sum(record.get(key, 0.0) for run in runs for record in run.values()) for key in phases}
    visible = [key for key in phases if seconds[key] >= SHORTEST_SHARE * sum(seconds.values())]
    return sorted(visible, key=lambda key: -seconds[key])


def _panel_of(key: str, defaults: Sequence[Panel], logged: set[str]) -> Panel:
    """Return the default chart that only draws this key, if there is one, else a chart titled with the key."""
    if key not in logged:
        raise ValueError(f"no run has the metric {key!r}.{did_you_mean(key, logged)}")
    for panel in defaults:
        if logged & set(panel.keys) == {key}:
            return panel
    info = describe(key)
    return Panel(key, textwrap.shorten(info.meaning, 70, placeholder=" …") if info else "", (key,))


def _draw(panels: Sequence[Panel], runs: Sequence[Run], names: Sequence[str], title: str, by_env_steps: bool) -> Figure:
    # A stacked chart uses a second cell for its legend.
    has_stack = panels[-1].stacked and not names
    num_cells = len(panels) + has_stack
    columns = num_cells if num_cells < 3 else 2 if num_cells == 4 else 3
    rows = math.ceil(num_cells / columns)
    figure = Figure(figsize=(4.3 * columns, 2.75 * rows + 0.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr, call-arg]
    figure.suptitle(f"{title}\n", x=0.012, ha="left", fontsize=12, fontweight="bold")
    figure.text(
        0.012,
        1 - 0.38 / figure.get_figheight(),
        _caption(runs, names, by_env_steps),
        color=FAINT,
        va="top",
        fontsize=8.5,
    )
    cells = list(figure.subplots(rows, columns, squeeze=False).flat)
    for index, panel in enumerate(panels):
        _draw_panel(cells[index], panel, runs, names)
        if index + columns >= len(panels):
            cells[index].set_xlabel("environment steps" if by_env_steps else "step")
    if has_stack:
        handles, labels = cells[len(panels) - 1].get_legend_handles_labels()
        cells[len(panels)].legend(
            handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(-0.12, 0.5), handlelength=0.9
        )
    for cell in cells[len(panels) :]:
        cell.axis("off")
    return figure


def _caption(runs: Sequence[Run], names: Sequence[str], by_env_steps: bool) -> str:
    steps = f"{max(max(run) for run in runs)} {'environment ' * by_env_steps}steps"
    if names:
        return f"{len(runs)} runs, {steps}."
    if len(runs) > 1:
        return f"{len(runs)} runs, {steps}. Thin: each run. Bold: their mean."
    window = _window(len(runs[0]))
    return f"{steps}." + (f" Thin: every step. Bold: mean over {window} steps." if window > 1 else "")


def _draw_panel(axis: Axes, panel: Panel, runs: Sequence[Run], names: Sequence[str]) -> None:
    log = panel.log and all(value > 0 for run in runs for key in panel.keys for value in _series(run, key).values())
    unit = ", ".join(filter(None, (panel.unit, "log scale" if log else "")))
    axis.set_title(panel.title, loc="left", fontweight="bold", fontsize=10, pad=16 if unit else 6)
    axis.text(0, 1.03, unit, transform=axis.transAxes, color=FAINT, fontsize=8.5)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axis.margins(x=0.01)
    if panel.stacked and names:  # a stack of several runs' phases would show the time of no run
        _draw_named(axis, [_series(run, STEP_SECONDS) for run in runs], names, "", LINES[0])
        axis.legend(loc="best", handlelength=1.6)
        axis.set_ylim(bottom=0)
        return
    if panel.stacked:
        _draw_stack(axis, panel, runs)
        return
    present = [
        (k, label) for k, label in zip(panel.keys, panel.labels, strict=True) if any(_series(r, k) for r in runs)
    ]
    for index, (key, label) in enumerate(present):
        if names:
            _draw_named(axis, [_series(run, key) for run in runs], names, label, LINES[index % len(LINES)])
        else:
            _draw_curves(axis, [_series(run, key) for run in runs], COLORS[index % len(COLORS)], label)
    if log:
        axis.set_yscale("log")
    if panel.floor is not None:
        axis.set_ylim(bottom=max(panel.floor, axis.get_ylim()[0]))
        axis.axhline(0, color="#bbbbbb", linewidth=0.8)
    if len(present) > 1 or (names and present):
        axis.legend(loc="best", handlelength=1.6)


def _draw_named(axis: Axes, series: Sequence[dict[int, float]], names: Sequence[str], label: str, line: str) -> None:
    """Draw each run in its own colour; metrics in the same chart differ in their line style."""
    for index, (name, one) in enumerate(zip(names, series, strict=True)):
        if one:
            values = _running_mean(np.array(list(one.values())))
            text = ", ".join(filter(None, (name, label)))
            axis.plot(list(one), values, line, color=COLORS[index % len(COLORS)], linewidth=1.5, label=text)


def _draw_curves(axis: Axes, series: Sequence[dict[int, float]], color: str, label: str) -> None:
    curves = [(np.array(list(one)), np.array(list(one.values()))) for one in series if one]
    marker = "o" if max(len(steps) for steps, _ in curves) <= SMOOTHED_FROM else None
    if len(curves) > 1:
        bold_steps, bold = _mean_curve(series)
    else:
        bold_steps, bold = curves[0][0], _running_mean(curves[0][1])
    thin = curves if len(curves) > 1 or _window(len(bold)) > 1 else []
    for steps, values in thin:
        axis.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
    axis.plot(bold_steps, bold, color=color, linewidth=1.9, label=label, marker=marker, markersize=3)


def _draw_stack(axis: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    """Draw the phases of a run, or their means over runs at the common steps; a missing phase counts as 0 seconds."""
    steps = sorted(set.intersection(*(set(_series(run, STEP_SECONDS) or run) for run in runs)))
    means = [[np.mean([run[step].get(key, 0.0) for run in runs]) for step in steps] for key in panel.keys]
    layers = [_running_mean(np.nan_to_num(np.array(mean))) for mean in means]
    axis.stackplot(steps, layers, labels=panel.labels, colors=COLORS, alpha=0.8, linewidth=0)
    axis.set_ylim(bottom=0)


def _series(run: Run, key: str) -> dict[int, float]:
    return {step: record[key] for step, record in run.items() if math.isfinite(record.get(key, math.nan))}


def _mean_curve(series: Sequence[dict[int, float]]) -> tuple[Floats, Floats]:
    """Return the mean over the runs at the steps that all runs with this metric have."""
    logged = [one for one in series if one]
    shared = sorted(set.intersection(*(set(one) for one in logged))) if logged else []
    return np.array(shared), np.array([np.mean([one[step] for one in logged]) for step in shared])


def _window(length: int) -> int:
    """Return the number of steps in a running mean: 1 for short runs, else a twentieth of the run, rounded to odd."""
    return 1 if length < SMOOTHED_FROM else 2 * (length // 40) + 3


def _running_mean(values: Floats) -> Floats:
    """Return the centred mean over `_window` values, with fewer values at the ends."""
    kernel = np.ones(_window(len(values)))
    return np.convolve(values, kernel, mode="same") / np.convolve(np.ones(len(values)), kernel, mode="same")
