"""SwanLab. Whether it is online is configured in swanlab itself (`swanlab offline`, or SWANLAB_MODE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import uuid4

import swanlab

from tether.metrics.loggers.protocol import RunInfo, Sample

ID_FILE = "swanlab_run_id.txt"


class SwanlabLogger:
    """Logs to a swanlab run, which a resumed run continues; offline, each resume writes its own file.

    Raises:
        ValueError: swanlab is online and nobody is logged in.
    """

    def __init__(self, run: RunInfo) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        id_file = run.directory / ID_FILE
        if run.resumed_step is None or not id_file.exists():
            id_file.write_text(uuid4().hex)
        try:
            self._run = swanlab.init(
                project=run.project,
                name=run.experiment,
                config=dict(run.config),
                log_dir=str(run.directory / "swanlab"),
                id=id_file.read_text(),
                resume="allow",
                # Its capture of the terminal garbles a live display.
                settings=swanlab.Settings(terminal={"proxy_type": "none"}),
            )
        except RuntimeError as error:
            raise ValueError(
                f"trainer.logger: swanlab does not start ({error}). Run swanlab login, or set SWANLAB_MODE=offline"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        texts = [
            swanlab.Text(f"{sample.prompt}\n-----\n{sample.response}", caption=_caption(sample)) for sample in samples
        ]
        self._run.log({"samples": texts}, step=step)

    def close(self) -> None:
        self._run.finish()


def _caption(sample: Sample) -> str:
    reward = sample.note or "none" if sample.reward is None else f"{sample.reward:g}"
    return f"row {sample.index}, reward {reward}"
