"""Trackers, those of services offline: what was logged is read back from what they wrote, also after a resume."""

import json
import os
import shutil
import sqlite3
import struct
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tether.metrics.loggers import LogFailed, Loggers, build_loggers
from tether.metrics.loggers.protocol import Logger, RunInfo, Sample

SAMPLE = Sample(3, "gsm8k", "What is 3+4?", "7", None, ground_truth=7, note="late")


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    return RunInfo(tmp_path, "project", "experiment", {"actor": {"lr": 1e-6, "betas": [0.9, 0.95]}, "empty": {}})


def log_steps(logger: Logger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        logger.log(step, {"critic/score/mean": step / 10, "val-core/openai/gsm8k/reward/mean@1": 0.5})
    logger.log_samples(last, [SAMPLE])
    logger.close()


def log_and_resume(name: str, run: RunInfo) -> None:
    """Log steps 1 to 3, then go on from a checkpoint of step 2."""
    log_steps(build_loggers([name], run), 1, 3)
    log_steps(build_loggers([name], replace(run, resumed_step=2)), 3, 4)


def test_tensorboard(run: RunInfo) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_and_resume("tensorboard", run)
    events = EventAccumulator(str(run.directory / "tensorboard"))
    events.Reload()
    scalars = [(event.step, round(event.value, 6)) for event in events.Scalars("critic/score/mean")]
    assert scalars == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    text = events.Tensors("samples/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert text == "**row 3, reward late**\n\n    What is 3+4?\n    -----\n    7"


PATHS = ("/home/me/data/train.parquet", "../data/./x", "", "a//b", "täglich/daten", "x" * 300, "c:\\data\\x?")


class Store:
    """What a client of mlflow is asked to store."""

    def __init__(self, *address: str | None) -> None:
        self.stored = list[list[str]]()

    def log_batch(self, run_id: str, metrics: list) -> None:
        self.stored.append([metric.key for metric in metrics])

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: SimpleNamespace(info=SimpleNamespace(run_id="r"), experiment_id="e")


def test_mlflow_has_a_name_for_every_data_source(
    run: RunInfo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is one that mlflow accepts, no two are the same, and that they differ from the keys is noted once."""
    pytest.importorskip("mlflow")
    from mlflow.utils.validation import _validate_metric

    from tether.metrics.loggers import mlflow

    monkeypatch.setattr(mlflow, "MlflowClient", Store)
    logger: Any = mlflow.MlflowLogger(replace(run, config={}))
    loggers = Loggers({"mlflow": logger})
    metrics = {f"val-core/{path}/acc/mean@{n}": 0.5 for path in PATHS for n in range(200)}
    loggers.log(1, {"val-core/openai/gsm8k/acc/mean@1": 0.5})
    assert not caplog.records
    loggers.log(2, metrics)
    loggers.log(3, metrics)
    assert [len(names) for names in logger._client.stored] == [1, 1000, 400, 1000, 400]
    names = [name for batch in logger._client.stored[:3] for name in batch]
    assert names[0] == "val-core/openai/gsm8k/acc/mean_at_1"
    assert names[1] == "val-core/_/home/me/data/train.parquet/acc/mean_at_0"
    assert len(set(names)) == 1401
    for name in names:
        _validate_metric(name, 0.5, 0, 1)
    (noted,) = caplog.records
    assert "val-core//home/me/data/train.parquet" in noted.getMessage()


def test_tensorboard_on_a_full_disk_is_one_clear_error_at_the_step_that_met_it(
    run: RunInfo, small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And not one of a thread later; what was written is whole, and goes on once there is room."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from tether.metrics.loggers.tensorboard import TensorboardLogger

    logger = TensorboardLogger(replace(run, directory=small_disk))
    logger.log(1, {"score": 1.0})
    filler = small_disk / "filler"
    filler.write_bytes(b"0" * shutil.disk_usage(small_disk).free)
    many = {f"metric {number}": 1.0 for number in range(2000)}
    with pytest.raises(LogFailed, match=rf"{small_disk}/tensorboard/.*: cannot be written \(No space left on device\)"):
        logger.log(2, many)
    filler.unlink()
    logger.log(100, {"score": 3.0})
    logger.close()
    events = EventAccumulator(str(small_disk / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("score")] == [(1, 1.0), (100, 3.0)]
    assert "Traceback" not in capfd.readouterr().err


class Closes:
    def __init__(self, closed: list[int], fails: bool = False) -> None:
        self.closed, self.fails = closed, fails

    def log(self, step: int, metrics: object) -> None: ...

    def log_samples(self, step: int, samples: object) -> None: ...

    def close(self) -> None:
        self.closed.append(1)
        if self.fails:
            raise LogFailed(28, "full")


def test_all_loggers_are_closed_also_where_one_fails() -> None:
    closed = list[int]()
    loggers = Loggers({"a": Closes(closed), "b": Closes(closed, fails=True), "c": Closes(closed)})
    with pytest.raises(LogFailed, match="full"):
        loggers.close()
    assert len(closed) == 3


@pytest.mark.slow  # its database is made by a hundred migrations
def test_mlflow(run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(run.directory)
    log_and_resume("mlflow", run)
    client = MlflowClient(f"sqlite:///{run.directory}/mlflow.db")
    experiment = client.get_experiment_by_name("project")
    (stored,) = client.search_runs([experiment.experiment_id])
    assert stored.info.run_name == "experiment"
    assert stored.info.status == "FINISHED"
    assert stored.data.params == {"actor.lr": "1e-06", "actor.betas": "[0.9, 0.95]", "empty": "{}"}
    history = client.get_metric_history(stored.info.run_id, "critic/score/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert client.get_metric_history(stored.info.run_id, "val-core/openai/gsm8k/reward/mean_at_1")
    (artifact,) = run.directory.glob("mlflow_artifacts/**/step_000004.json")
    assert json.loads(artifact.read_text())["samples"][0]["prompt"] == "What is 3+4?"


@pytest.mark.slow  # two runs start a service each
def test_wandb_offline(run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_and_resume("wandb", run)
    first, second = sorted(run.directory.glob("wandb/offline-run-*/*.wandb"))
    assert first.name == second.name, "a resumed run goes on under the same id"
    history, config = [], {}
    for data in _wandb_records(first):
        record = Record.FromString(data)
        items = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
        if "critic/score/mean" in items:
            history.append((int(items["_step"]), float(items["critic/score/mean"])))
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    assert history == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert config["actor"] == {"lr": 1e-6, "betas": [0.9, 0.95]}
    (table,) = first.parent.glob("files/media/table/*.json")
    assert json.loads(table.read_text())["data"] == [[3, "gsm8k", "What is 3+4?", "7", None, "7", "late", False, "{}"]]


def test_trackio(run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(run.directory / "trackio"))  # which is read when it is imported
    pytest.importorskip("trackio")
    log_and_resume("trackio", run)
    build_loggers(["trackio"], run).close()  # the same names again, from the start
    database = sqlite3.connect(run.directory / "trackio/project.db")
    rows = [(step, json.loads(metrics)) for step, metrics in database.execute("select step, metrics from metrics")]
    scores = [(step, metrics["critic/score/mean"]) for step, metrics in rows if "critic/score/mean" in metrics]
    assert scores == [(1, 0.1), (2, 0.2), (3, 0.3), (3, 0.3), (4, 0.4)]
    assert len(database.execute("select distinct run_id from metrics").fetchall()) == 1
    tables = [(step, metrics["samples"]["_value"]) for step, metrics in rows if "samples" in metrics]
    assert tables == [(step, [asdict(SAMPLE) | {"ground_truth": "7", "extra": "{}"}]) for step in (3, 4)]
    ((config,),) = database.execute("select config from configs").fetchall()
    assert json.loads(config)["actor"] == {"lr": 1e-6, "betas": [0.9, 0.95]}


@pytest.mark.slow  # each run looks at the machine
def test_swanlab_offline(run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    monkeypatch.setenv("SWANLAB_MODE", "offline")
    log_and_resume("swanlab", run)
    first, second = sorted(run.directory.glob("swanlab/run-*/*.swanlab"))
    assert first.name == second.name, "a resumed run goes on under the same id"
    reader = DataStoreReader()
    reader.open(first)
    records = [Record.FromString(data) for data in reader]
    reader.close()
    scalars = [record.scalar for record in records if record.HasField("scalar")]
    scores = [(scalar.step, scalar.value.number) for scalar in scalars if scalar.key == "critic/score/mean"]
    assert scores == [(1, 0.1), (2, 0.2), (3, 0.3)]
    (caption,) = (item.caption for record in records for item in record.media.value.items)
    assert caption == "row 3, reward late"
    assert "lr: 1.0e-06" in (first.parent / "files/config.yaml").read_text()
    (sample,) = first.parent.glob("media/text/*.txt")
    assert sample.read_text() == "What is 3+4?\n-----\n7"


def test_swanlab_without_a_login_is_one_error(run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "online")
    monkeypatch.setenv("HOME", str(run.directory))
    with open(os.devnull) as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        with pytest.raises(ValueError, match=r"^trainer.logger: swanlab does not start \(.*\). Run swanlab login, or"):
            build_loggers(["swanlab"], run)


def _wandb_records(path: Path) -> Iterator[bytes]:
    """Read the log of an offline run: a header of 7 bytes, then LevelDB log records in blocks of 32 KiB."""
    data, position, pending = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        pending += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last fragment
            yield pending
            pending = b""
