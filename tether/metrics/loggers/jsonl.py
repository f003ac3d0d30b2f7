"""Every metric and every sample of a run as lines of JSON: `metrics.jsonl` and `samples.jsonl` in its folder.

These files are what `tether plot` and other tools read. A line is on the disk before `log` returns. A run that resumes
from step N first drops the lines after N, so that no step stands there twice; a fresh run moves older files aside.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from tether.metrics.loggers.protocol import RunInfo, Sample

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class JsonlLogger:
    """Appends ``{"step": N, "<key>": value, ...}``; a value that is not finite is written as null."""

    def __init__(self, run: RunInfo) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        self._metrics = _open(run.directory / METRICS_FILE, run.resumed_step)
        self._samples = _open(run.directory / SAMPLES_FILE, run.resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line with all metrics."""
        finite = {key: float(value) if math.isfinite(value) else None for key, value in metrics.items()}
        _append(self._metrics, [{"step": step, **finite}])

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Append a line for each sample."""
        _append(self._samples, [{"step": step, **asdict(sample)} for sample in samples])

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._samples.close()


def read_metrics(run_directory: Path) -> dict[int, dict[str, float]]:
    """Read the metrics of a run, step -> key -> value; several lines of a step are joined, null is NaN.

    Raises:
        ValueError: there is no `metrics.jsonl`, or a line of it is not JSON.
    """
    path = run_directory / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{run_directory}: no {METRICS_FILE} here; name the folder of a run")
    steps: dict[int, dict[str, float]] = {}
    for _, record in _records(path):
        step = record.pop("step")
        steps.setdefault(step, {}).update({k: math.nan if v is None else v for k, v in record.items()})
    return dict(sorted(steps.items()))


def read_samples(run_directory: Path) -> dict[int, list[dict[str, Any]]]:
    """Read the validation samples of a run, step -> samples as written; empty if it has none."""
    path = run_directory / SAMPLES_FILE
    steps: dict[int, list[dict[str, Any]]] = {}
    for _, record in _records(path) if path.is_file() else ():
        steps.setdefault(record.pop("step"), []).append(record)
    return steps


def _append(file: TextIO, records: Sequence[Mapping[str, Any]]) -> None:
    file.writelines(json.dumps(record, default=str, ensure_ascii=False) + "\n" for record in records)
    file.flush()
    os.fsync(file.fileno())


def _open(path: Path, resumed_step: int | None) -> TextIO:
    if path.exists() and resumed_step is None:
        path.rename(_free_name(path))
    elif path.exists():
        kept = [line for line, record in _records(path) if record["step"] <= resumed_step]
        replacement = path.with_suffix(".tmp")
        replacement.write_text("".join(kept), encoding="utf-8")
        replacement.replace(path)
    return path.open("a", encoding="utf-8")


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line and its content; a last line without its end is what a killed process left, and is skipped."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield line, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not a line of JSON ({error}); mend or delete the line") from error
