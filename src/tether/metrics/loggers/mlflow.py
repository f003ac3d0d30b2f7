"""MLflow. The tracking server is configured in mlflow itself; by default a SQLite file in the run's folder is used."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256

import mlflow
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tether.metrics.loggers.protocol import LogFailed, RunInfo, Sample

ID_FILE = "mlflow_run_id.txt"
MAX_BATCH = 100
"""Maximum parameters in one call of mlflow."""
MAX_METRICS = 1000
"""Maximum metrics in one call of mlflow."""
MAX_NAME = 250
"""Maximum characters of the name of a metric or parameter."""
MAX_VALUE = 6000
"""Maximum characters of a parameter's value."""


class MlflowLogger:
    """Logs to an mlflow run, which a resumed run continues; steps that mlflow already has are not logged again."""

    def __init__(self, run: RunInfo) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        self._notes: list[str] = []
        self._has_noted = False
        own_store = not mlflow.is_tracking_uri_set()
        self._client = MlflowClient(f"sqlite:///{run.directory.resolve()}/mlflow.db" if own_store else None)
        id_file = run.directory / ID_FILE
        if run.resumed_step is not None and id_file.exists():
            self._run_id = id_file.read_text()
            self._last_step = self._logged_until()
        else:
            artifacts = (run.directory.resolve() / "mlflow_artifacts").as_uri() if own_store else None
            self._run_id = self._create_run(run, artifacts)
            self._last_step = -1
            id_file.write_text(self._run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step <= self._last_step:
            return
        now = int(time.time() * 1000)
        batch = [Metric(_mlflow_name(key), float(value), now, step) for key, value in metrics.items()]
        with _storing():
            for start in range(0, len(batch), MAX_METRICS):
                self._client.log_batch(self._run_id, metrics=batch[start : start + MAX_METRICS])
        renamed = [key for key in metrics if _mlflow_name(key) != _in_mlflow_characters(key)]
        if renamed and not self._has_noted:
            self._has_noted = True
            self._notes.append(
                f"mlflow does not accept {renamed[0]!r} as the name of a metric and has it as "
                f"{_mlflow_name(renamed[0])!r}; so it is with other paths in data_source"
            )

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Store the samples as the artifact `samples/step_<N>.json`."""
        rows = [asdict(sample) | {"ground_truth": str(sample.ground_truth)} for sample in samples]
        with _storing():
            self._client.log_dict(self._run_id, {"samples": rows}, f"samples/step_{step:06d}.json")

    def close(self) -> None:
        with _storing():
            self._client.set_terminated(self._run_id)

    def _create_run(self, run: RunInfo, artifacts: str | None) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(run.project, artifact_location=artifacts)
        )
        run_id = self._client.create_run(experiment_id, run_name=run.experiment).info.run_id
        params = [Param(_mlflow_name(key), str(value)[:MAX_VALUE]) for key, value in _leaves(run.config).items()]
        for start in range(0, len(params), MAX_BATCH):
            self._client.log_batch(run_id, params=params[start : start + MAX_BATCH])
        return run_id

    def _logged_until(self) -> int:
        keys = self._client.get_run(self._run_id).data.metrics
        histories = (self._client.get_metric_history(self._run_id, key) for key in keys)
        return max((metric.step for history in histories for metric in history), default=-1)


@contextmanager
def _storing() -> Iterator[None]:
    try:
        yield
    except (MlflowException, OSError) as error:
        why = str(error).strip().splitlines()[0]
        raise LogFailed(
            errno.EIO,
            f"mlflow: takes no more ({why}). Free space where it stores, or bring its server back, and start the same "
            "command again; or take mlflow out of trainer.logger",
        ) from error


def _mlflow_name(key: str) -> str:
    """Return a name that mlflow accepts: a normalised relative path that is not too long."""
    segments = _in_mlflow_characters(key).split("/")
    name = "/".join(f"_{segment}" if segment in ("", ".", "..") else segment for segment in segments)
    if len(name) <= MAX_NAME:
        return name
    digest = sha256(key.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME - len(digest) - 1]}_{digest}"


def _in_mlflow_characters(key: str) -> str:
    """Spell a key with the characters that mlflow allows: ``mean@4`` becomes ``mean_at_4``."""
    return re.sub(r"[^\w\-. :/]", "_", key.replace("@", "_at_"))


def _leaves(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _leaves(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
