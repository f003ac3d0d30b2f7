"""Weights & Biases. Whether it is online is configured in wandb itself (`wandb offline`, or the environment)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import uuid4

import wandb

from tether.metrics.loggers.protocol import RunInfo, Sample

ID_FILE = "wandb_run_id.txt"
COLUMNS = ("index", "data_source", "prompt", "response", "reward", "ground_truth", "note", "truncated", "extra")
AS_TEXT = ("ground_truth", "extra")


class WandbLogger:
    """Logs to a wandb run, which a resumed run continues.

    wandb ignores steps that it already has when a resumed run logs them again. Nothing is lost, because a resumed run
    repeats them exactly.
    """

    def __init__(self, run: RunInfo) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        id_file = run.directory / ID_FILE
        if run.resumed_step is None or not id_file.exists():
            id_file.write_text(uuid4().hex)
        self._run = wandb.init(
            project=run.project,
            name=run.experiment,
            config=dict(run.config),
            dir=str(run.directory),
            id=id_file.read_text(),
            resume="allow",
            settings=wandb.Settings(console="off"),  # its capture of the terminal garbles a live display
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        cells = [{column: getattr(sample, column) for column in COLUMNS} for sample in samples]
        rows = [[str(value) if column in AS_TEXT else value for column, value in row.items()] for row in cells]
        self._run.log({"samples": wandb.Table(columns=[*COLUMNS], data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()
