"""Compares a plan with the measurements of a run, and corrects later plans for the same device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tether.config import LoadedConfig, RunConfig, load_config
from tether.metrics.loggers import read_metrics
from tether.plan.assumptions import Assumptions
from tether.plan.devices import GIB, Device
from tether.plan.planning import Interval, Planner
from tether.runtime.cache import OTHER_CACHE, cache_dir
from tether.runtime.core_clock import BUSY
from tether.runtime.disk import writing

TIMING = "timing_s/"
WAITED = "perf/cpu_wait_fraction"
PEAKS = {True: "perf/cpu_memory_peak_gb", False: "perf/max_memory_allocated_gb"}
"""Metric of the peak memory, for a run on a CPU (True) and on a GPU (False)."""
WARM_UP = 1
"""Number of first steps that are ignored, because kernels are compiled in them."""
RATES, TOLERANCE = ("teraflops", "bandwidth"), 0.1
"""Rates that describe a device, and the maximum relative difference up to which its corrections apply."""


@dataclass(frozen=True)
class Comparison:
    """Measurements of a run next to its plan."""

    seconds: Mapping[str, tuple[Interval, float]]
    """Phase -> planned and measured seconds of a step."""
    peak: tuple[float, float] | None
    """Planned and measured bytes of the fullest device; None if not measured."""
    corrections: Mapping[str, float]
    """Phase -> measured / planned seconds, where the plan is without earlier corrections."""
    busy: float
    """Share of time that the compared median step waited for cores used by other programs; 0 if unknown."""


def load_run_config(run: Path) -> LoadedConfig:
    """Return the configuration of a run from its last checkpoint.

    Raises:
        ValueError: the folder has no checkpoint.
    """
    results = [*run.glob("global_step_*/run.yaml"), *run.glob("run.yaml")]
    if not results:
        raise ValueError(f"{run}: has no global_step_N/run.yaml; a run is compared once it has saved a checkpoint")
    return load_config(max(results, key=lambda file: file.stat().st_mtime), [])


def phase_medians(run: Path) -> dict[str, float]:
    """Return the medians of a run's metrics over its steps, except the first ones.

    Steps in which other programs used the cores are excluded, unless there are only such steps.
    """
    steps = read_metrics(run)
    compared = [steps[step] for step in sorted(steps)[WARM_UP:] or sorted(steps)]
    compared = [step for step in compared if step.get(WAITED, 0.0) <= BUSY] or compared
    measured: dict[str, list[float]] = {}
    for step in compared:
        for key, value in step.items():
            measured.setdefault(key, []).append(value)
    return {key: median(values) for key, values in measured.items()}


def _assumptions(config: RunConfig, medians: Mapping[str, float]) -> Assumptions:
    """Return assumptions with the measured lengths of a run."""
    if config.sft.enable:
        rows = config.data.train_batch_size
        learned, tokens = medians.get("train/learned_tokens"), medians.get("perf/total_num_tokens")
        if learned is None or tokens is None:
            return Assumptions()
        return Assumptions(prompt=(tokens - learned) / rows, mean=learned / rows)
    tail, limit = medians.get("response_length/max"), float(config.actor_rollout_ref.rollout.response_length)
    return Assumptions(
        prompt=medians.get("prompt_length/mean"),
        mean=medians.get("response_length/mean"),
        tail=None if tail is None else min(limit, tail),
    )


def compare(run: Path, device: Device, corrections: Mapping[str, float]) -> Comparison:
    """Compare the medians of a run's steps with a plan for its measured lengths.

    Raises:
        ValueError: the folder has no metrics, or no checkpoint.
    """
    medians = phase_medians(run)
    config = load_run_config(run).config
    assumptions = _assumptions(config, medians)
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
    busy = medians.get(WAITED, 0.0) if device.is_cpu else 0.0
    return Comparison(seconds, None if peak is None else (plan.peak, peak * GIB), ratios, busy)


def corrections_file() -> Path:
    """Return the file with the corrections of all devices."""
    return cache_dir() / "plan_corrections.json"


def load_corrections(device: Device) -> dict[str, float]:
    """Return phase -> measured / planned seconds for a device; empty if no run on it was compared.

    Corrections belong to plans with certain device rates, so they no longer apply after a measurement with other rates.
    """
    file = corrections_file()
    if not file.is_file():
        return {}
    try:
        entry = json.loads(file.read_text(encoding="utf-8")).get(device.name, {})
        if any(abs(getattr(device, rate) / entry.get(rate, 1e-9) - 1) > TOLERANCE for rate in RATES):
            return {}
        return {str(phase): float(ratio) for phase, ratio in entry["phases"].items()}
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{file}: cannot be read ({error}). Delete it; `tether plan RUN` writes it again") from None


def save_corrections(device: Device, corrections: Mapping[str, float]) -> None:
    """Save the corrections of a device for later plans, replacing earlier ones of the same phases.

    Raises:
        ValueError: the cache cannot be written.
    """
    phases = {**load_corrections(device), **corrections}
    file = corrections_file()
    every = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    every[device.name] = {**{rate: getattr(device, rate) for rate in RATES}, "phases": phases}
    with writing(file, OTHER_CACHE):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(every, indent=1), encoding="utf-8")
