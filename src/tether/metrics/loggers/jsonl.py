"""Every metric and sample of a run as lines of JSON, in `metrics.jsonl` and `samples.jsonl` of its folder.

`events.jsonl` has the starts of the run, each with its configuration, and the warnings.

`tether plot` and other tools read these files. `log` returns when the complete line is in the file; lines are synced to
disk at most once per second. A step has one line: metrics that are logged later, such as the duration of its
checkpoint, are added to that line. A run that resumes from step N first drops the lines after N, so that no step occurs
twice, and appends dropped metrics to `discarded.jsonl`; a fresh run moves older files aside. Files of metrics or
samples that are deleted during the run are written again completely.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from io import FileIO
from pathlib import Path

from tether import __version__
from tether.metrics.loggers.protocol import RunInfo, Sample, log_failed
from tether.types import JsonObject

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
EVENTS_FILE = "events.jsonl"
DISCARDED_FILE = "discarded.jsonl"


class JsonlLogger:
    """Appends ``{"step": N, "<key>": value, ...}``; non-finite values are written as null."""

    def __init__(self, run: RunInfo) -> None:
        self._metrics = _Lines(run.directory / METRICS_FILE, run.resumed_step, run.directory / DISCARDED_FILE)
        self._samples = _Lines(run.directory / SAMPLES_FILE, run.resumed_step)
        self._last_step = self._metrics.last_step
        if run.resumed_step and self._last_step is None:
            logger.warning("%s has no line of the steps before the resume", run.directory / METRICS_FILE)
        self._events = _Events(run)

    def keep_warning(self, message: str) -> None:
        """Append a warning, with the step in which it was shown, to the events."""
        self._events.add("warning", {"text": message})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line with all metrics, or extend the last line if it is of the same step.

        Raises:
            LogFailed: the file cannot be written.
        """
        finite = {key: float(value) if math.isfinite(value) else None for key, value in metrics.items()}
        if step != self._last_step:
            self._metrics.append([{"step": step, **finite}])
            self._last_step = self._events.step = step
        elif finite:
            self._metrics.extend(step, finite)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Append a line for each sample.

        Raises:
            LogFailed: the file cannot be written.
        """
        self._samples.append([{"step": step, **asdict(sample)} for sample in samples])

    def close(self) -> None:
        self._events.close()
        self._metrics.close()
        self._samples.close()


def read_metrics(run_directory: Path) -> dict[int, dict[str, float]]:
    """Read the metrics of a run, step -> key -> value; several lines of a step are merged, and null becomes NaN.

    Raises:
        ValueError: there is no `metrics.jsonl`, or it has a line that is not a line of metrics.
    """
    path = run_directory / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{run_directory}: no {METRICS_FILE} here; name the folder of a run")
    steps: dict[int, dict[str, float]] = {}
    for number, (_, record) in enumerate(_records(path), start=1):
        step = record.pop("step")
        for key, value in record.items():
            if value is not None and type(value) not in (int, float):
                raise ValueError(f"{path}:{number}: {key} is {value!r}, which is no number; fix or delete the line")
        steps.setdefault(step, {}).update({k: math.nan if v is None else v for k, v in record.items()})
    return dict(sorted(steps.items()))


def read_samples(run_directory: Path) -> dict[int, list[JsonObject]]:
    """Read the validation samples of a run as step -> samples; empty if it has none."""
    path = run_directory / SAMPLES_FILE
    steps: dict[int, list[JsonObject]] = {}
    for _, record in _records(path) if path.is_file() else ():
        steps.setdefault(record.pop("step"), []).append(record)
    return steps


def read_events(run_directory: Path) -> list[JsonObject]:
    """Read the starts and warnings of a run, in order of time; empty if it has none."""
    path = run_directory / EVENTS_FILE
    return [record for _, record in _records(path)] if path.is_file() else []


class _Events(logging.Handler):
    """Records a run's starts and warnings, including those that tether logs. A failure only loses the event."""

    def __init__(self, run: RunInfo) -> None:
        super().__init__(logging.WARNING)
        self.step = run.resumed_step or 0
        self._path = run.directory / EVENTS_FILE
        if run.resumed_step is None and self._path.exists():
            with suppress(OSError):
                self._path.rename(_free_name(self._path))
        start = {"resumed": run.resumed_step is not None, "version": __version__, "code": code_version()}
        self.add("start", start | {"total_steps": run.total_steps, "config": run.config})
        logging.getLogger("tether").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Record what any module of tether logs as a warning or an error."""
        self.add("warning", {"text": record.getMessage()})
        # Python itself prints a record only if there is no handler. If there are others, one of them prints it.
        if logging.lastResort and [*logging.getLogger("tether").handlers[:1], *logging.getLogger().handlers] == [self]:
            logging.lastResort.handle(record)

    def add(self, kind: str, content: Mapping[str, object]) -> None:
        event = {"step": self.step, "time": time.time(), "kind": kind, **content}
        line = json.dumps(event, default=str, ensure_ascii=False) + "\n"
        with suppress(OSError), self._path.open("ab") as file:
            file.write(line.encode(errors="backslashreplace"))

    def close(self) -> None:
        logging.getLogger("tether").removeHandler(self)
        super().close()


def code_version() -> str | None:
    """Return the commit of the clone that contains this package; None if it is not installed from a clone."""
    git = Path(__file__).resolve().parents[4] / ".git"
    try:
        if git.is_file():  # in a worktree, .git is a file that names its folder
            git = Path(git.read_text().removeprefix("gitdir:").strip())
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head[:12]
        common = (git / (git / "commondir").read_text().strip()) if (git / "commondir").exists() else git
        return (common / head.removeprefix("ref: ")).read_text().strip()[:12]
    except OSError:
        return None


class _Lines:
    """A file of JSON lines in which every line is complete.

    Args:
        path: path of the file.
        resumed_step: step after which lines are dropped; None moves an existing file aside.
        discarded: the file that dropped lines are appended to.
    """

    def __init__(self, path: Path, resumed_step: int | None, discarded: Path | None = None) -> None:
        self._path = path
        self._synced = -math.inf
        self.last_step: int | None = None
        """Step of the last line kept from the run that is resumed."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resumed_step is None:
                for earlier in filter(None, (path, discarded)):
                    if earlier.exists():
                        earlier.rename(_free_name(earlier))
            elif path.exists():
                read = [(line, record["step"]) for line, record in _records(path)]
                lines = [(line, step) for line, step in read if step <= resumed_step]
                if discarded and (dropped := [line for line, step in read if step > resumed_step]):
                    with discarded.open("ab") as file:
                        file.write(b"".join(dropped))
                _write_all(path, b"".join(line for line, _ in lines))
                self.last_step = lines[-1][1] if lines else None
            self._file = _open(path)
        except OSError as error:
            raise log_failed(path, error) from error

    def append(self, records: Sequence[JsonObject]) -> None:
        lines = "".join(json.dumps(record, default=str, ensure_ascii=False) + "\n" for record in records)
        self._put(lines.encode(errors="backslashreplace"))  # write a lone surrogate as JSON's own escape

    def extend(self, step: int, additions: Mapping[str, float | None]) -> None:
        """Overwrite the ``}`` at the end of the last line, which must be of `step`, with ``, "key": value}``."""
        if self._path.exists() and not self._is_open_there():
            # After the file was replaced, its last line may be of another step.
            self.append([{"step": step, **additions}])
        else:
            self._put(f", {json.dumps(additions)[1:]}\n".encode(), over=len("}\n"))

    def _put(self, data: bytes, over: int = 0) -> None:
        """Write at the end, replacing the last `over` bytes; if the disk is full, the file is unchanged."""
        try:
            self._follow()
            start = self._file.seek(-over, os.SEEK_END)
            before = os.pread(self._file.fileno(), over, start)
            try:
                _write(self._file, data)
                self._sync_now_and_then()
            except OSError:
                with suppress(OSError):
                    os.pwrite(self._file.fileno(), before, start)
                    self._file.truncate(start + over)
                raise
        except OSError as error:
            raise log_failed(self._path, error) from error

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise log_failed(self._path, error) from error
        finally:
            self._file.close()

    def _sync_now_and_then(self) -> None:
        """Sync at most once a second: lines survive a crash of the machine, and short steps do not wait for the
        disk."""
        if time.monotonic() - self._synced > 1:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def _follow(self) -> None:
        """Reopen the file if it was replaced, and write it again if it was deleted."""
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _write_all(self._path, os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0))
            logger.warning("%s was deleted during the run; it is written again, with all its lines", self._path)
        if not self._is_open_there():
            replaced, self._file = self._file, _open(self._path)
            replaced.close()

    def _is_open_there(self) -> bool:
        return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))


def _open(path: Path) -> FileIO:
    path.touch()
    return path.open("r+b", buffering=0)  # not "ab", which could only write at the end


def _write(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _write_all(path: Path, data: bytes) -> None:
    """Replace the content of a file atomically."""
    new = path.with_suffix(".tmp")
    new.unlink(missing_ok=True)
    with _open(new) as file:
        _write(file, data)
        os.fsync(file.fileno())
    new.replace(path)


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate


def _records(path: Path) -> Iterator[tuple[bytes, JsonObject]]:
    """Yield each line and its content; an incomplete last line, left by a killed process, is skipped.

    A line that a running training is just extending is skipped in the same way.
    """
    with path.open("rb") as file:
        end, start = os.fstat(file.fileno()).st_size, 0
        for number, line in enumerate(file, start=1):
            if start >= end or not line.endswith(b"\n"):
                return
            start += len(line)
            try:
                record = json.loads(line.decode(errors="replace"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: not a line of JSON ({error}); fix or delete the line") from error
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise ValueError(f'{path}:{number}: not a line of this log: no whole number "step"; delete the line')
            yield line, record
