"""trackio, which stores on this machine; other targets, such as a Space, are configured in trackio itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import trackio

from tether.metrics.loggers.protocol import RunInfo, Sample


class TrackioLogger:
    """Logs to a trackio run. A resumed run continues the last one of its name; repeated steps have equal values."""

    def __init__(self, run: RunInfo) -> None:
        self._run = trackio.init(
            project=run.project,
            name=run.experiment,
            config=dict(run.config),
            resume="never" if run.resumed_step is None else "allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [
            asdict(sample) | {"ground_truth": str(sample.ground_truth), "extra": str(sample.extra)}
            for sample in samples
        ]
        self._run.log({"samples": trackio.Table(data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()
