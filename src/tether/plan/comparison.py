"""A plan beside what a run measured, and the correction of later plans for the same device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tether.config import LoadedConfig, load_config
from tether.metrics.loggers import read_metrics
from tether.plan.assumptions import Assumptions
from tether.plan.devices import GIB, Device
from tether.plan.planning import Interval, Planner
from tether.runtime.cache import cache_dir

TIMING = "timing_s/"
PEAKS = {True: "perf/cpu_memory_peak_gb", False: "perf/max_memory_allocated_gb"}
"""Metric of the peak, of a run on a CPU and on a GPU."""
WARM_UP = 1
"""First steps that are not compared: kernels are compiled in them."""


@dataclass(frozen=True)
class Comparison:
    """A run beside its plan."""

    seconds: Mapping[str, tuple[Interval, float]]
    """Phase -> planned and measured seconds of a step."""
    peak: tuple[float, float] | None
    """Planned and measured bytes of the fullest device; None if not measured."""
    corrections: Mapping[str, float]
    """Phase -> measured seconds / planned ones, without earlier corrections."""


def settings_of(run: Path) -> LoadedConfig:
    """Return the configuration of a run from its last checkpoint.

    Raises:
        ValueError: the folder has no checkpoint.
    """
    results = [*run.glob("global_step_*/run.yaml"), *run.glob("run.yaml")]
    if not results:
        raise ValueError(f"{run}: has no global_step_N/run.yaml; a run is compared once it has saved a checkpoint")
    return load_config(max(results, key=lambda file: file.stat().st_mtime), [])


def medians_of(run: Path) -> dict[str, float]:
    """Return the medians of a run's metrics over its steps, without the first ones."""
    steps = read_metrics(run)
    measured: dict[str, list[float]] = {}
    for step in sorted(steps)[WARM_UP:] or sorted(steps):
        for key, value in steps[step].items():
            measured.setdefault(key, []).append(value)
    return {key: median(values) for key, values in measured.items()}


def compare(run: Path, device: Device, corrections: Mapping[str, float]) -> Comparison:
    """Compare the medians of a run's steps with its plan, for the lengths that it had.

    Raises:
        ValueError: the folder has no metrics, or no checkpoint.
    """
    medians = medians_of(run)
    config = settings_of(run).config
    mean, prompt = medians.get("response_length/mean"), medians.get("prompt_length/mean")
    tail = medians.get("response_length/max")
    limit = config.actor_rollout_ref.rollout.response_length
    assumptions = Assumptions(prompt=prompt, mean=mean, tail=None if tail is None else min(float(limit), tail))
    plain = Planner(config, device, assumptions).plan()
    plan = Planner(config, device, assumptions, corrections).plan()
    seconds = {
        phase: (interval, medians[TIMING + phase])
        for phase, interval in (*plan.times.items(), ("step", plan.step))
        if medians.get(TIMING + phase)
    }
    peak = medians.get(PEAKS[device.is_cpu])
    ratios = {
        phase: medians[TIMING + phase] / plain.times[phase].middle
        for phase in plain.times
        if medians.get(TIMING + phase) and plain.times[phase].middle
    }
    return Comparison(seconds, None if peak is None else (plan.peak, peak * GIB), ratios)


def corrections_file() -> Path:
    """Return the file with the corrections of all devices."""
    return cache_dir() / "plan_corrections.json"


def corrections_of(device: Device) -> dict[str, float]:
    """Return phase -> measured seconds / planned ones for a device; empty if no run on it was compared."""
    file = corrections_file()
    if not file.is_file():
        return {}
    try:
        results = json.loads(file.read_text(encoding="utf-8")).get(device.name, {})
        return {str(phase): float(ratio) for phase, ratio in results.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file}: cannot be read ({error}). Delete it; `tether plan RUN` writes it again") from None


def keep_corrections(device: Device, corrections: Mapping[str, float]) -> None:
    """Keep the corrections of a device for later plans, in the place of earlier ones of the same phases."""
    file = corrections_file()
    every = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    every[device.name] = {**every.get(device.name, {}), **corrections}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(every, indent=1), encoding="utf-8")
