"""TensorBoard event files in `<run>/tensorboard`.

Events are written synchronously. torch's own writer uses a thread, whose errors appear late or only as a traceback.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar, text

from tether.metrics.loggers.protocol import RunInfo, Sample, log_failed

_numbers = count()


class TensorboardLogger:
    """Writes scalars, and samples as text. Events after the step that a run resumes from are purged."""

    def __init__(self, run: RunInfo) -> None:
        first_step = 0 if run.resumed_step is None else run.resumed_step + 1
        folder = run.directory / "tensorboard"
        now, host = int(time.time()), socket.gethostname()
        self._path = folder / f"events.out.tfevents.{now:010d}.{host}.{os.getpid()}.{next(_numbers)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb", buffering=0)
        except OSError as error:
            raise log_failed(self._path, error) from error
        begin = SessionLog(status=SessionLog.START)
        self._write([Event(file_version="brain.Event:2"), Event(step=first_step, session_log=begin)])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write each metric as a scalar.

        Raises:
            LogFailed: they cannot be written.
        """
        self._write(_event(step, scalar(key, value)) for key, value in metrics.items())

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the samples as one text.

        Raises:
            LogFailed: it cannot be written.
        """
        self._write([_event(step, text("samples", "\n\n".join(map(_markdown, samples))))])

    def close(self) -> None:
        self._file.close()

    def _write(self, events: Iterable[Event]) -> None:
        """Append events; if the disk is full, the file is unchanged."""
        records = io.BytesIO()
        writer = RecordWriter(records)
        for event in events:
            event.wall_time = time.time()
            writer.write(event.SerializeToString())
        remaining, begin = records.getvalue(), self._file.tell()
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(begin)
                self._file.seek(begin)
            raise log_failed(self._path, error) from error


def _event(step: int, summary: Summary) -> Event:
    return Event(step=step, summary=summary)


def _markdown(sample: Sample) -> str:
    reward = sample.note or "none" if sample.reward is None else f"{sample.reward:g}"
    text = f"{sample.prompt}\n-----\n{sample.response}"
    # Indented, so that it is shown verbatim instead of as markdown.
    indented = "\n".join(f"    {line}" for line in text.splitlines())
    return f"**row {sample.index}, reward {reward}**\n\n{indented}"
