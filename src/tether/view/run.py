"""Reads the folder of a run by offsets: opening it reads no samples, and following it only reads what was added."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.metrics.loggers import DISCARDED_FILE, EVENTS_FILE, METRICS_FILE, SAMPLES_FILE
from tether.metrics.records import RECORDS_FILE, RecordHead, heads, read_record, unpack
from tether.observations import Array
from tether.runtime.run_lock import owner_of
from tether.types import JsonObject

ROLLBACK = re.compile(r"goes back to .* \(rollback \d+ of \d+\)")
"""Matches the warning about a rollback."""
MAX_HELD_RECORDS = 12
"""Maximum number of records of texts, tokens and episodes in memory."""
TAIL = 64
"""Number of bytes before the read position that are compared to detect a rewritten file."""


class LineFile:
    """A growing file of JSON lines; `refresh` returns new complete lines.

    If the file was replaced or has become shorter, it is read again from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end, self._identity = 0, (0, 0)
        self.tail = b""
        """Last bytes before the read position, to detect a rewritten file."""

    def refresh(self) -> tuple[bool, list[tuple[int, bytes]]]:
        """Return whether the file was replaced, which invalidates earlier lines, and offset and text of new lines."""
        try:
            with self.path.open("rb") as file:
                status = self.path.stat()
                identity = (status.st_dev, status.st_ino)
                file.seek(max(0, self._end - len(self.tail)))
                is_new = identity != self._identity or file.read(len(self.tail)) != self.tail
                self._end, self._identity = 0 if is_new else self._end, identity
                file.seek(self._end)
                data = file.read()
        except FileNotFoundError:
            is_new, self._end, data = self._end > 0, 0, b""
        data = data[: data.rfind(b"\n") + 1]
        lines, offset = [], self._end
        for line in data.splitlines(keepends=True):
            lines.append((offset, line))
            offset += len(line)
        self._end, self.tail = offset, lines[-1][1][-TAIL:] if lines else (b"" if is_new else self.tail)
        return is_new, lines


class RunFolder:
    """A run, read from its folder; `refresh` reads what was added.

    Args:
        folder: folder of the run.

    Raises:
        ValueError: there is no run in the folder.
    """

    def __init__(self, folder: Path) -> None:
        if not is_run(folder):
            raise ValueError(f"{folder}: no run here; name the folder of a run, or a folder of such folders")
        self.folder = folder
        self._metrics, self._events = LineFile(folder / METRICS_FILE), LineFile(folder / EVENTS_FILE)
        self._validation, self._dropped = LineFile(folder / SAMPLES_FILE), LineFile(folder / DISCARDED_FILE)
        self._discarded: list[JsonObject] = []
        self.metrics: dict[int, dict[str, float | None]] = {}
        """Step -> key -> value; None if it was not finite."""
        self.events: list[JsonObject] = []
        self.validation_lines: dict[int, list[int]] = {}
        """Step -> offsets of its validation samples."""
        self.validation_sizes: dict[tuple[str, int], int] = {}
        """Data source and step -> number of validation prompts behind its score, filled on request."""
        self._heads: list[RecordHead] = []
        self._by_kind: dict[str, dict[int, RecordHead]] = {}
        self._last_bytes = b""
        """The end of the last record, to detect a rewritten file."""
        self._records: dict[RecordHead, JsonObject] = {}
        """Cache of the records read last."""
        self._columns: dict[int, dict[str, Array]] = {}
        self._task_names: dict[int, list[str]] = {}
        self.version = 0
        """Incremented at each change of the folder."""
        self.refresh()

    def refresh(self) -> bool:
        """Read what was added since the last call; return whether anything was added."""
        changed = self._refresh_metrics()
        changed |= self._refresh_records()
        is_new, lines = self._events.refresh()
        if is_new:
            self.events = []
        self.events += [json.loads(line.decode(errors="replace")) for _, line in lines]
        changed |= bool(lines)
        is_new, lines = self._dropped.refresh()
        earlier = [] if is_new else self._discarded
        self._discarded = earlier + [json.loads(line) for _, line in lines]
        self.version += changed
        return changed

    def _refresh_metrics(self) -> bool:
        end, tail = self._metrics._end, self._metrics.tail
        is_new, lines = self._metrics.refresh()
        if not is_new and end and not lines:
            return False
        if is_new:
            self.metrics = {}
        for _, line in lines:
            record = json.loads(line.decode(errors="replace"))
            self.metrics.setdefault(record.pop("step"), {}).update(record)
        return bool(lines) or tail != self._metrics.tail

    def _refresh_records(self) -> bool:
        path = self.folder / RECORDS_FILE
        size = path.stat().st_size if path.exists() else 0
        end = self._heads[-1].offset + self._heads[-1].size if self._heads else 0
        if size < end or _bytes_before(path, end) != self._last_bytes:
            self._heads, self._by_kind, self._columns, self._task_names, self._records, end = [], {}, {}, {}, {}, 0
        new = list(heads(path, end))
        for head in new:
            self._by_kind.setdefault(head.kind, {})[head.step] = head
        self._heads += new
        if new:
            self._last_bytes = _bytes_before(path, new[-1].offset + new[-1].size)
        return bool(new)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def kind(self) -> str:
        """``text`` or ``control``."""
        if self.config:
            return "control" if self.setting("env.train.id") is not None else "text"
        keys = {key for record in self.metrics.values() for key in record}
        return "control" if any(key.startswith(("env/", "eval/")) for key in keys) else "text"

    @property
    def config(self) -> JsonObject:
        """The configuration of the last start; empty for runs of versions that did not record it."""
        starts = [event for event in self.events if event["kind"] == "start"]
        return starts[-1]["config"] if starts else {}

    @property
    def first_config(self) -> JsonObject:
        """The configuration of the first start."""
        return next((event["config"] for event in self.events if event["kind"] == "start"), {})

    @property
    def rollbacks(self) -> int:
        """Number of rollbacks, each of which lowered the learning rate."""
        return sum(event["kind"] == "warning" and bool(ROLLBACK.search(event["text"])) for event in self.events)

    def setting(self, path: str) -> Any:
        """Return the value of a configuration key; None if it is not set."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    @property
    def is_running(self) -> bool:
        """Whether a process is working on the run."""
        return owner_of(self.folder) is not None

    @property
    def steps(self) -> list[int]:
        """Steps with samples or episodes, ascending."""
        return sorted(self._by_kind.get("columns", ()))

    def record(self, kind: str, step: int) -> JsonObject | None:
        """Return a record of a step; None if it was not recorded."""
        head = self._by_kind.get(kind, {}).get(step)
        if head is None:
            return None
        if head not in self._records:
            if len(self._records) == MAX_HELD_RECORDS:
                self._records.pop(next(iter(self._records)))
            self._records[head] = read_record(self.folder / RECORDS_FILE, head)
        return self._records[head]

    def columns(self, step: int) -> dict[str, Array]:
        """Return the columns of a step; empty if it was not recorded."""
        if step not in self._columns:
            head = self._by_kind.get("columns", {}).get(step)
            record = read_record(self.folder / RECORDS_FILE, head) if head else {}
            self._task_names[step] = record.get("tasks", [])
            self._columns[step] = {name: unpack(value) for name, value in record.items() if isinstance(value, dict)}
        return self._columns[step]

    def task_names(self, step: int) -> list[str]:
        """Return the descriptions of a step's tasks, by the indices of its column `task`; empty if it has none."""
        self.columns(step)
        return self._task_names[step]

    def steps_with_text(self, text: str) -> list[int]:
        """Return the steps whose prompts, responses or reward details contain a text; other steps are not parsed."""
        needle = json.dumps(text, ensure_ascii=False)[1:-1].encode(errors="backslashreplace")
        steps, texts = [], self._by_kind.get("texts", {})
        if not texts:
            return []
        with (self.folder / RECORDS_FILE).open("rb", buffering=0) as file:
            for step, head in sorted(texts.items()):
                if needle in os.pread(file.fileno(), head.size, head.offset):
                    steps.append(step)
        return steps

    def _index_validation(self) -> None:
        is_new, lines = self._validation.refresh()
        if is_new:
            self.validation_lines, self.validation_sizes = {}, {}
        for offset, line in lines:
            step = int(line[len(b'{"step": ') : line.index(b",")])
            self.validation_lines.setdefault(step, []).append(offset)

    def validation(self, step: int) -> list[JsonObject]:
        """Return the validation samples of a step."""
        self._index_validation()
        offsets = self.validation_lines.get(step, [])
        if not offsets:
            return []
        with (self.folder / SAMPLES_FILE).open("rb") as file:
            samples = []
            for offset in offsets:
                file.seek(offset)
                samples.append(json.loads(file.readline().decode(errors="replace")))
        return samples

    @property
    def validation_steps(self) -> list[int]:
        """Steps with validation samples, ascending."""
        self._index_validation()
        return sorted(self.validation_lines)

    @property
    def discarded(self) -> list[list[JsonObject]]:
        """Metrics of the steps that were discarded when the run resumed from an earlier step, one list per resume."""
        branches: list[list[JsonObject]] = []
        remaining = self._discarded
        for start in [event["step"] for event in self.events if event["kind"] == "start" and event["resumed"]][::-1]:
            first = len(remaining)
            while (
                first and remaining[first - 1]["step"] > start and not _step_decreases(remaining[first - 1 : first + 1])
            ):
                first -= 1
            branches.insert(0, remaining[first:])
            remaining = remaining[:first]
        return [branch for branch in [remaining, *branches] if branch]

    def series(self, key: str) -> dict[int, float]:
        """Return the finite values of a metric by step."""
        values = {step: record.get(key) for step, record in sorted(self.metrics.items())}
        return {step: value for step, value in values.items() if value is not None and math.isfinite(value)}

    def mean(self, key: str, steps: Callable[[int], bool] = lambda step: True) -> float | None:
        """Return the mean of a metric over selected steps; None without values."""
        values = [value for step, value in self.series(key).items() if steps(step)]
        return sum(values) / len(values) if values else None

    @property
    def keys(self) -> list[str]:
        """All metrics of the run."""
        return sorted({key for record in self.metrics.values() for key in record})

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Folder of the policy in each checkpoint, by step."""
        saved = [*self.folder.glob("best/global_step_*/actor"), *self.folder.glob("global_step_*/actor")]
        numbered = {path.parent.name.removeprefix("global_step_"): path for path in saved}
        return {int(step): path for step, path in numbered.items() if step.isdecimal()}

    @property
    def videos(self) -> list[str]:
        """Names of the videos of evaluations."""
        return sorted(path.name for path in (self.folder / "video").glob("*.mp4"))

    @property
    def last_image_episode(self) -> JsonObject | None:
        """Step and row of an episode in the last recorded step whose observations include images, or None."""
        record = self.record("episodes", self.steps[-1]) if self.steps else None
        for episode in record["rows"] if record else ():
            packed = [one for one in episode["observations"].values() if isinstance(one, dict)]
            if any(len(one["shape"]) == 4 for one in packed):
                return {"step": self.steps[-1], "row": episode["segment"]}
        return None

    @property
    def missing_data(self) -> Mapping[str, str]:
        """Data that a viewer could show but this run did not record, each with the setting that records it."""
        missing = {}
        if not self._heads:
            missing["samples" if self.kind == "text" else "episodes"] = "trainer.record_mb=2 (0 records nothing)"
        if self.kind == "text" and not self.validation_steps:
            missing["validation"] = "data.val_files, with trainer.test_freq or trainer.val_before_train"
        if self.kind == "control" and self.last_image_episode is None and not self.videos:
            missing["film"] = "env.eval.video_cfg.save_video=True; or tether play on a checkpoint"
        return missing


def _step_decreases(records: Sequence[JsonObject]) -> bool:
    return len(records) == 2 and records[0]["step"] >= records[1]["step"]


def _bytes_before(path: Path, end: int) -> bytes:
    """Return the last bytes before an offset."""
    if not end:
        return b""
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), TAIL, end - TAIL)


def is_run(folder: Path) -> bool:
    """Whether a folder is the folder of a run."""
    return (folder / METRICS_FILE).is_file()


def find_runs(folders: list[Path]) -> list[Path]:
    """Return the runs among the folders and inside of them, to a depth of 3.

    Raises:
        ValueError: a folder contains no run.
    """
    by_path: dict[Path, Path] = {}  # two paths to one folder, for example through a link, are one run
    for folder in folders:
        runs = [folder] if is_run(folder) else sorted(_find_runs(folder, 3))
        if not runs:
            raise ValueError(f"{folder}: no run here; name the folder of a run, or a folder of such folders")
        for run in runs:
            by_path.setdefault(run.resolve(), run)
    return list(by_path.values())


def _find_runs(folder: Path, depth: int) -> Iterator[Path]:
    if not folder.is_dir() or depth == 0:
        return
    for child in folder.iterdir():
        if is_run(child):
            yield child
        elif child.is_dir() and not child.is_symlink():
            yield from _find_runs(child, depth - 1)
