"""The result of a run, read from the files in its folder."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean

from tether.checkpoints import BEST, CheckpointStore
from tether.commands.policy import Policy, load
from tether.metrics.loggers import HELD_OUT_LOSS, read_metrics, validation_means

HELD_OUT = "val-core"
"""Name of the score if there are several data sources; it is the mean of their held-out scores."""
SCORES = (HELD_OUT_LOSS, "eval/return", "critic/score/mean", "env/return")
"""Scores of runs without held-out prompts; the first one that was logged is used."""


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run that ended or was stopped; for a resumed run, counted from its original start."""

    folder: Path
    """Folder with checkpoints, logs and samples."""
    checkpoint: Path | None
    """The last checkpoint, for `tether.load`; None: none was saved."""
    step: int
    """Number of completed training steps."""
    total_steps: int
    score: str
    """Name of the metric used as the score: of evaluations if there were any, else of training; "" without one."""
    best_score: float
    """The best score; NaN if there is none."""
    best_step: int | None
    last_score: float
    metrics: list[dict[str, float]] = field(repr=False)
    """One dict per logged step: "step", and the metrics (`tether.metrics.keys`) that were logged."""
    stopped_by: str | None = None
    """The signal or the setting (trainer.on_collapse, trainer.stop_at_score) that stopped the run before its last step.
    """
    best_checkpoint: Path | None = None
    """Checkpoint of the best evaluation; None: not kept (trainer.keep_best)."""

    @cached_property
    def model(self) -> Policy:
        """Return the policy of the last checkpoint, loaded by `tether.load` at the first access.

        Raises:
            ValueError: no checkpoint was saved.
        """
        if self.checkpoint is None:
            raise ValueError(f"{self.folder}: no checkpoint was saved; trainer.save_freq=-1 keeps the last step's")
        return load(self.checkpoint)

    @property
    def collapsed(self) -> bool:
        """Return whether the run was stopped because its policy collapsed; `tether train` then exits with 3."""
        return self.stopped_by == "trainer.on_collapse"

    def column(self, key: str) -> list[float]:
        """Return the values of a metric for every logged step; NaN for steps that did not log it.

        Raises:
            ValueError: no step logged it.
        """
        if not any(key in row for row in self.metrics):
            raise ValueError(f"{key}: not logged by {self.folder}; see the keys of result.metrics")
        return [row.get(key, math.nan) for row in self.metrics]

    def to_pandas(self) -> object:
        """Return the metrics as a `pandas.DataFrame` with the step as index.

        Raises:
            ValueError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ModuleNotFoundError as error:
            raise ValueError("to_pandas needs pandas: pip install pandas; result.metrics has the same as dicts") from (
                error
            )
        return pandas.DataFrame(self.metrics).set_index("step")


def read_result(folder: Path, *, step: int, total_steps: int, stopped_by: str | None = None) -> TrainingResult:
    """Read the result of the run in a folder."""
    steps = read_metrics(folder)
    key, scores = run_scores(steps)
    best = max(scores, key=scores.__getitem__, default=None)
    if key == HELD_OUT_LOSS:
        best = min(scores, key=scores.__getitem__)
    return TrainingResult(
        folder=folder,
        checkpoint=CheckpointStore(folder).last_saved(),
        step=step,
        total_steps=total_steps,
        score=key,
        best_score=math.nan if best is None else scores[best],
        best_step=best,
        last_score=scores[max(scores)] if scores else math.nan,
        metrics=[{"step": index, **metrics} for index, metrics in steps.items()],
        stopped_by=stopped_by,
        best_checkpoint=CheckpointStore(folder / BEST).last_saved(),
    )


def run_scores(steps: Mapping[int, Mapping[str, float]]) -> tuple[str, dict[int, float]]:
    """Return the name of the score (`TrainingResult.score`), and its value for each step that has one."""
    evaluated = {step: validation_means(metrics) for step, metrics in steps.items()}
    if keys := {key for means in evaluated.values() for key in means}:
        scores = {step: fmean(means.values()) for step, means in evaluated.items() if means}
        return (keys.pop() if len(keys) == 1 else HELD_OUT), _without_nan(scores)
    for key in SCORES:
        if scores := _without_nan({step: metrics[key] for step, metrics in steps.items() if key in metrics}):
            return key, scores
    return "", {}


def _without_nan(scores: Mapping[int, float]) -> dict[int, float]:
    return {step: score for step, score in scores.items() if not math.isnan(score)}
