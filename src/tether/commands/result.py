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
from tether.metrics.loggers import read_metrics, validation_means

HELD_OUT = "val-core"
"""Name of the score of several data sources: the mean of their held-out scores."""
SCORES = ("eval/return", "critic/score/mean", "env/return")
"""The score of a run without held-out prompts: the first of these that it logged."""


@dataclass(frozen=True)
class TrainingResult:
    """A run that ended, or was stopped; a resumed one as a whole."""

    folder: Path
    """Checkpoints, logs and samples."""
    checkpoint: Path | None
    """The last one, for `tether.load`; None: none was saved."""
    step: int
    """Training steps done."""
    total_steps: int
    score: str
    """The metric that the run is judged by: that of tests where there were any, else of training; "" without one."""
    best_score: float
    """NaN where nothing was scored."""
    best_step: int | None
    last_score: float
    metrics: list[dict[str, float]] = field(repr=False)
    """One dict per logged step: "step" and those of `tether.metrics.keys` that were logged."""
    stopped_by: str | None = None
    """The signal, or the setting (trainer.on_collapse, trainer.stop_at_score), that stopped it before its last step."""
    best_checkpoint: Path | None = None
    """Of the best test; None: it was not kept (trainer.keep_best)."""

    @cached_property
    def model(self) -> Policy:
        """The policy of the last checkpoint, as `tether.load` gives it; loaded when it is first used.

        Raises:
            ValueError: no checkpoint was saved.
        """
        if self.checkpoint is None:
            raise ValueError(f"{self.folder}: no checkpoint was saved; trainer.save_freq=-1 keeps the last step's")
        return load(self.checkpoint)

    @property
    def collapsed(self) -> bool:
        """Whether it was stopped because its policy has collapsed; `tether train` then exits with 3."""
        return self.stopped_by == "trainer.on_collapse"

    def column(self, key: str) -> list[float]:
        """A metric at every logged step, NaN where it was not logged.

        Raises:
            ValueError: no step has it.
        """
        if not any(key in row for row in self.metrics):
            raise ValueError(f"{key}: not logged by {self.folder}; see the keys of result.metrics")
        return [row.get(key, math.nan) for row in self.metrics]

    def to_pandas(self) -> object:
        """The metrics as a `pandas.DataFrame` with the step as index.

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
    """The result of the run in a folder."""
    steps = read_metrics(folder)
    key, scores = run_scores(steps)
    best = max(scores, key=scores.__getitem__, default=None)
    return TrainingResult(
        folder=folder,
        checkpoint=CheckpointStore(folder).last_saved(),
        step=step,
        total_steps=total_steps,
        score=key,
        best_score=math.nan if best is None else scores[best],
        best_step=best,
        last_score=scores[max(scores)] if scores else math.nan,
        metrics=[{"step": number, **metrics} for number, metrics in steps.items()],
        stopped_by=stopped_by,
        best_checkpoint=CheckpointStore(folder / BEST).last_saved(),
    )


def run_scores(steps: Mapping[int, Mapping[str, float]]) -> tuple[str, dict[int, float]]:
    """The metric that a run is judged by, and its value by step, where it has one; see `TrainingResult.score`."""
    tested = {step: validation_means(metrics) for step, metrics in steps.items()}
    if keys := {key for means in tested.values() for key in means}:
        scores = {step: fmean(means.values()) for step, means in tested.items() if means}
        return (keys.pop() if len(keys) == 1 else HELD_OUT), _numbers(scores)
    for key in SCORES:
        if scores := _numbers({step: metrics[key] for step, metrics in steps.items() if key in metrics}):
            return key, scores
    return "", {}


def _numbers(scores: Mapping[int, float]) -> dict[int, float]:
    return {step: score for step, score in scores.items() if not math.isnan(score)}
