"""Several runs: their differences, curves as means over seeds, and whether seeds distinguish them significantly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from tether.metrics.loggers import validation_means
from tether.metrics.names import distinct_names
from tether.spelling import did_you_mean
from tether.types import JsonObject
from tether.view.queries import axis_values
from tether.view.run import RunFolder

SEED = "trainer.seed"
IGNORED = (SEED, "trainer.default_local_dir", "trainer.experiment_name", "data.seed", "env.train.seed",
           "env.eval.seed", "trainer.resume_mode", "trainer.resume_from_path")  # fmt: skip
"""Keys that may differ between repetitions of one experiment."""
LAST_SHARE = 0.1
"""Share of the last steps whose mean is the result of a run without evaluations."""
T_99 = (63.66, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947, 2.921,
        2.898, 2.878, 2.861, 2.845)  # fmt: skip
"""0.995 quantiles of Student's t by degrees of freedom, from 1."""
POINTS = 200
"""Number of points of a curve over seeds."""


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a tree to values by dotted keys."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return values


def differences(runs: Sequence[RunFolder]) -> list[JsonObject]:
    """Return the configuration keys and code versions that are not the same in all runs."""
    configs = [configured(run) | {"(code)": _code(run)} for run in runs]
    keys = sorted({key for config in configs for key in config})
    rows = [{"key": key, "values": [config.get(key) for config in configs]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def _code(run: RunFolder) -> str | None:
    starts = [event for event in run.events if event["kind"] == "start"]
    return f"{starts[-1]['version']} {starts[-1]['code'] or ''}".strip() if starts else None


LEARNING_RATE, ROLLBACK_FACTOR = "actor_rollout_ref.actor.optim.lr", "trainer.rollback_lr_factor"


def configured(run: RunFolder) -> dict[str, Any]:
    """Return the configuration of the last start, with the original learning rate if rollbacks lowered it."""
    config, first = flat(run.config), flat(run.first_config)
    for count in range(1, run.rollbacks + 1):
        if math.isclose(config[LEARNING_RATE], first[LEARNING_RATE] * first[ROLLBACK_FACTOR] ** count):
            config[LEARNING_RATE] = first[LEARNING_RATE]
    return config


def experiments(runs: Sequence[RunFolder]) -> list[list[int]]:
    """Return the indices of the runs of each experiment: runs that only differ in their seed, folder and name."""
    by_identity: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        config = {key: value for key, value in configured(run).items() if key not in IGNORED}
        identity = repr(sorted(config.items(), key=lambda item: item[0])) if config else str(run.folder)
        by_identity.setdefault(identity, []).append(index)
    return list(by_identity.values())


def score_key(run: RunFolder) -> str | None:
    """Return the metric used as a run's score: of validation, or else of training."""
    validation = sorted(validation_means(dict.fromkeys(run.keys, 0.0)))
    keys = [*validation, "eval/return", "critic/score/mean", "env/return"]
    return next((key for key in keys if run.series(key)), None)


def result(run: RunFolder, key: str) -> float | None:
    """Return the result of a run: the mean of a metric over the last tenth of its values."""
    values = list(run.series(key).values())
    return fmean(values[-max(1, math.ceil(LAST_SHARE * len(values))) :]) if values else None


def verdict(one: Sequence[float], other: Sequence[float], names: tuple[str, str], key: str) -> JsonObject:
    """Return in words whether the seeds distinguish two experiments, by Welch's 99 % interval.

    With fewer than two seeds of an experiment its spread is unknown.
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
    """Return the mean of curves [runs][points], and its 95 % bootstrap interval over runs."""
    values = np.array(curves)
    picks = np.random.default_rng(0).integers(0, len(values), (draws, len(values)))
    means = values[picks].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return values.mean(axis=0).tolist(), low.tolist(), high.tolist()


MAX_CHANGES = 3
"""Maximum number of configuration keys in the name of an experiment."""


def comparison(runs: Sequence[RunFolder]) -> JsonObject:
    """Return differences, experiments with their members, a table of results, verdicts and warnings of several runs."""
    names = distinct_names([run.folder for run in runs])
    grouped, changed = experiments(runs), differences(runs)
    labels = experiment_labels(runs, names, grouped, changed)
    keys = Counter(key for run in runs if (key := score_key(run)))
    key = keys.most_common(1)[0][0] if keys else None
    results = [result(run, key) if key else None for run in runs]
    by_seed = [
        [fmean(scored) for rows in seeds(runs, members).values() if (scored := _known(results, rows))]
        for members in grouped
    ]
    verdicts = [
        verdict(by_seed[first], by_seed[second], (labels[first], labels[second]), key)
        for first, second in combinations(range(len(grouped)), 2)
        if key and by_seed[first] and by_seed[second]
    ]
    warnings = []
    for label, members in zip(labels, grouped, strict=True):
        repeated = [
            f"{len(rows)} runs have seed {seed} ({', '.join(names[row] for row in rows)})"
            for seed, rows in seeds(runs, members).items()
            if len(rows) > 1
        ]
        if repeated:
            warnings.append(
                f"{label}: {'; '.join(repeated)}. Their configurations are equal, so they count once, with their mean. "
                "If they are not the same experiment, compare fewer runs."
            )
    rows = [row | {"by_experiment": [_shared(row["values"], members) for members in grouped]} for row in changed]
    return {
        "names": names,
        # Values that only differ within an experiment, such as seeds, do not distinguish experiments.
        "differences": [row for row in rows if len(grouped) == 1 or len(set(row["by_experiment"])) > 1],
        "experiments": [
            {"label": label, "runs": members, "members": [names[row] for row in members]}
            for label, members in zip(labels, grouped, strict=True)
        ],
        "key": key,
        "keys": sorted({key for run in runs for key in run.keys}),
        "results": [
            {"name": name, "folder": str(run.folder), "steps": max(run.metrics, default=0), "result": value}
            | {"seconds": (axis_values(run, "seconds") or {0: 0.0}).get(max(run.metrics, default=0))}
            | {"seed": run.setting(SEED), "experiment": labels[next(at for at, r in enumerate(grouped) if row in r)]}
            for row, (name, run, value) in enumerate(zip(names, runs, results, strict=True))
        ],
        "verdicts": verdicts,
        "warnings": warnings,
    }


def _known(values: Sequence[float | None], rows: Sequence[int]) -> list[float]:
    return [value for row in rows if (value := values[row]) is not None]


def _shared(values: Sequence[Any], members: Sequence[int]) -> str:
    """Return the value shared by an experiment's runs, or their values if they differ."""
    shown = [_shown(values[row]) for row in members]
    return shown[0] if len(set(shown)) == 1 else ", ".join(shown)


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)


def seeds(runs: Sequence[RunFolder], members: Sequence[int]) -> dict[Any, list[int]]:
    """Return the runs of an experiment by seed; a run whose seed is unknown has its own entry."""
    by_seed: dict[Any, list[int]] = {}
    for row in members:
        seed = runs[row].setting(SEED)
        by_seed.setdefault(f"unknown of run {row}" if seed is None else seed, []).append(row)
    return by_seed


def experiment_labels(
    runs: Sequence[RunFolder], names: Sequence[str], grouped: Sequence[list[int]], changed: Sequence[JsonObject]
) -> list[str]:
    """Return a name for each experiment: that of a single run, or else its distinguishing settings and its seeds."""
    repeated = [members for members in grouped if len(members) > 1]
    compared = repeated if len(repeated) > 1 else grouped
    distinct = {
        row["key"]: len({_shared(row["values"], members) for members in compared})
        for row in changed
        if row["key"] not in IGNORED and not any(row["values"][at] is None for members in compared for at in members)
    }
    keys = sorted((key for key in distinct if distinct[key] > 1), key=lambda key: -distinct[key])
    last = Counter(key.rsplit(".", 1)[-1] for key in keys)
    values = {row["key"]: row["values"] for row in changed}
    labels = []
    for members in grouped:
        if len(members) == 1:
            labels.append(names[members[0]])
            continue
        changes = []
        for key in keys[:MAX_CHANGES]:
            name = key.rsplit(".", 1)[-1]
            changes.append(f"{name if last[name] == 1 else key}={_shared(values[key], members)}")
        count = len(seeds(runs, members))
        repetitions = f"{count} seeds" if count == len(members) else f"{len(members)} runs of {count} seeds"
        labels.append(", ".join([*changes, repetitions]))
    # If those keys do not distinguish the experiments, add the name of the first run.
    return [
        f"{label}: {names[members[0]]}, ..."
        if len(members) > 1 and (labels.count(label) > 1 or "=" not in label)
        else label
        for label, members in zip(labels, grouped, strict=True)
    ]


def mean_curves(runs: Sequence[RunFolder], key: str, axis: str = "step") -> list[JsonObject]:
    """Return the curve of each experiment: the mean over its seeds at points where all have values, with its interval.

    Raises:
        ValueError: no run has the metric.
    """
    metrics = {name for run in runs for name in run.keys}
    if key not in metrics:
        raise ValueError(f"no run has the metric {key!r}.{did_you_mean(key, metrics)}")
    return [_mean_curve(runs, members, key, axis) for members in experiments(runs)]


def _mean_curve(runs: Sequence[RunFolder], members: Sequence[int], key: str, axis: str) -> JsonObject:
    by_seed: list[list[dict[float, float]]] = []
    for rows in seeds(runs, members).values():
        curves = []
        for row in rows:
            at = axis_values(runs[row], axis)
            curves.append({at[step]: value for step, value in runs[row].series(key).items() if step in at})
        by_seed.append([curve for curve in curves if curve])
    by_seed = [curves for curves in by_seed if curves]
    points = [curve for curves in by_seed for curve in curves]
    if len(points) < 2:
        only = points[0] if points else {}
        return {"x": list(only), "y": list(only.values()), "low": [], "high": [], "n": len(points)}
    start, end = max(min(one) for one in points), min(max(one) for one in points)
    shared = sorted(set.intersection(*(set(one) for one in points)))
    x = shared if len(shared) > 1 else np.linspace(start, end, POINTS).tolist()
    y = [
        np.mean([np.interp(x, list(one), list(one.values())) for one in curves], axis=0).tolist() for curves in by_seed
    ]
    if len(y) == 1:
        return {"x": x, "y": y[0], "low": [], "high": [], "n": 1}
    mean, low, high = bootstrap_mean(y)
    return {"x": x, "y": mean, "low": low, "high": high, "n": len(y)}


def run_table(folders: Sequence[Path]) -> list[JsonObject]:
    """Return a table of runs: kind, model or task, steps, best score, last activity and state."""
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
