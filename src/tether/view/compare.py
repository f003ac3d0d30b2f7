"""Several runs: what differs between them, their curves as means over seeds, and whether seeds can tell them apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from tether.metrics.loggers import validation_means
from tether.metrics.names import distinct_names
from tether.types import JsonObject
from tether.view.queries import axis_values
from tether.view.run import RunFolder

IGNORED = ("trainer.seed", "trainer.default_local_dir", "trainer.experiment_name", "data.seed", "env.train.seed",
           "env.eval.seed", "trainer.resume_mode", "trainer.resume_from_path")  # fmt: skip
"""Keys in which repetitions of one experiment may differ."""
LAST_SHARE = 0.1
"""Share of the steps, the last ones, whose mean is the result of a run without evaluations."""
T_99 = (63.66, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947, 2.921,
        2.898, 2.878, 2.861, 2.845)  # fmt: skip
"""0.995 quantiles of Student's t by degrees of freedom, from 1."""
POINTS = 200
"""Points of a curve over seeds."""


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by dotted keys."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return values


def differences(runs: Sequence[RunFolder]) -> list[JsonObject]:
    """Return the keys of the configuration, and the versions of the code, that are not the same in all runs."""
    configs = [flat(run.config) | {"(code)": _code(run)} for run in runs]
    keys = sorted({key for config in configs for key in config})
    rows = [{"key": key, "values": [config.get(key) for config in configs]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def _code(run: RunFolder) -> str | None:
    starts = [event for event in run.events if event["kind"] == "start"]
    return f"{starts[-1]['version']} {starts[-1]['code'] or ''}".strip() if starts else None


def experiments(runs: Sequence[RunFolder]) -> list[list[int]]:
    """Return the runs of each experiment, by index: those that differ in their seed, folder and name only."""
    by_identity: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        config = {key: value for key, value in flat(run.config).items() if key not in IGNORED}
        identity = repr(sorted(config.items(), key=lambda item: item[0])) if config else str(run.folder)
        by_identity.setdefault(identity, []).append(index)
    return list(by_identity.values())


def score_key(run: RunFolder) -> str | None:
    """Return the metric that judges a run: validation, else the score of training."""
    validation = sorted(validation_means(dict.fromkeys(run.keys, 0.0)))
    keys = [*validation, "eval/return", "critic/score/mean", "env/return"]
    return next((key for key in keys if run.series(key)), None)


def result(run: RunFolder, key: str) -> float | None:
    """Return the result of a run: the mean of a metric over the last tenth of its values."""
    values = list(run.series(key).values())
    return fmean(values[-max(1, math.ceil(LAST_SHARE * len(values))) :]) if values else None


def verdict(one: Sequence[float], other: Sequence[float], names: tuple[str, str], key: str) -> JsonObject:
    """Return in words whether the results of seeds tell two experiments apart, by Welch's interval of 99 %.

    With fewer than two seeds of either nothing is known of their spread.
    """
    means = fmean(one), fmean(other)
    shown = f"{key}: {names[0]} {means[0]:.4g} (n={len(one)}), {names[1]} {means[1]:.4g} (n={len(other)})"
    if min(len(one), len(other)) < 2:
        return {
            "differ": False,
            "text": f"{shown}. No difference can be told from these seeds: one run says nothing of the spread between "
            "seeds. Train at least three of each.",
        }
    errors = [stdev(values) ** 2 / len(values) for values in (one, other)]
    variance = sum(errors)
    freedom = (
        variance**2 / sum(e**2 / (len(v) - 1) for e, v in zip(errors, (one, other), strict=True)) if variance else 1e9
    )
    half = T_99[min(max(int(freedom), 1), len(T_99)) - 1] * math.sqrt(variance)
    difference = means[1] - means[0]
    interval = f"difference {difference:+.4g}, 99 % interval {difference - half:.4g} to {difference + half:.4g}"
    if abs(difference) <= half:
        return {"differ": False, "text": f"{shown}; {interval}. No difference can be told from these seeds."}
    return {"differ": True, "text": f"{shown}; {interval}. {names[difference > 0]} is better."}


def bootstrap_mean(curves: Sequence[Sequence[float]], draws: int = 300) -> tuple[list[float], list[float], list[float]]:
    """Return the mean of curves [runs][points], and the 95 % bootstrap interval over runs."""
    values = np.array(curves)
    picks = np.random.default_rng(0).integers(0, len(values), (draws, len(values)))
    means = values[picks].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return values.mean(axis=0).tolist(), low.tolist(), high.tolist()


def comparison(runs: Sequence[RunFolder]) -> JsonObject:
    """Return differences, experiments, final table and verdicts of several runs."""
    names = distinct_names([run.folder for run in runs])
    grouped = experiments(runs)
    key = next((key for run in runs if (key := score_key(run))), None)
    labels = [names[rows[0]] if len(rows) == 1 else f"{names[rows[0]]} (mean of {len(rows)})" for rows in grouped]
    results = [result(run, key) if key else None for run in runs]
    verdicts = []
    for first in range(len(grouped)):
        for second in range(first + 1, len(grouped)):
            pair = [[r for row in grouped[at] if (r := results[row]) is not None] for at in (first, second)]
            if key and all(pair):
                verdicts.append(verdict(pair[0], pair[1], (labels[first], labels[second]), key))
    return {
        "names": names,
        "differences": differences(runs),
        "experiments": [{"label": label, "runs": rows} for label, rows in zip(labels, grouped, strict=True)],
        "key": key,
        "keys": sorted(set.intersection(*(set(run.keys) for run in runs))) if runs else [],
        "results": [
            {"name": name, "folder": str(run.folder), "steps": max(run.metrics, default=0), "result": value}
            | {"seconds": (axis_values(run, "seconds") or {0: 0.0}).get(max(run.metrics, default=0))}
            for name, run, value in zip(names, runs, results, strict=True)
        ],
        "verdicts": verdicts,
    }


def mean_curves(runs: Sequence[RunFolder], key: str, axis: str = "step") -> list[JsonObject]:
    """Return the curve of each experiment: the mean over its runs where all have values, with its interval."""
    curves = []
    for rows in experiments(runs):
        points = []
        for row in rows:
            at = axis_values(runs[row], axis)
            series = {at[step]: value for step, value in runs[row].series(key).items() if step in at}
            if series:
                points.append(series)
        if not points:
            curves.append({"x": [], "y": [], "low": [], "high": [], "n": 0})
            continue
        if len(points) == 1:
            curves.append({"x": list(points[0]), "y": list(points[0].values()), "low": [], "high": [], "n": 1})
            continue
        start, end = max(min(one) for one in points), min(max(one) for one in points)
        shared = sorted(set.intersection(*(set(one) for one in points)))
        x = shared if len(shared) > 1 else np.linspace(start, end, POINTS).tolist()
        y = [np.interp(x, list(one), list(one.values())).tolist() for one in points]
        mean, low, high = bootstrap_mean(y)
        curves.append({"x": x, "y": mean, "low": low, "high": high, "n": len(points)})
    return curves


def run_table(folders: Sequence[Path]) -> list[JsonObject]:
    """Return what identifies each run: kind, model or task, steps, best score, last activity and state."""
    rows = []
    for folder in folders:
        run = RunFolder(folder)
        key = score_key(run)
        series = run.series(key) if key else {}
        last, total = max(run.metrics, default=0), run.setting("trainer.total_training_steps")
        total = next((e["total_steps"] for e in reversed(run.events) if e["kind"] == "start"), total)
        rows.append(
            {
                "name": str(folder),
                "kind": run.kind,
                "model": run.setting("actor_rollout_ref.model.path") if run.kind == "text" else None,
                "task": run.setting("env.train.id") if run.kind == "control" else run.setting("data.train_files"),
                "steps": last,
                "total_steps": total,
                "best": max(series.values(), default=None),
                "score": key,
                "last_activity": (folder / "metrics.jsonl").stat().st_mtime,
                "state": "running" if run.is_running else "finished" if total and last >= total else "stopped",
            }
        )
    return rows
