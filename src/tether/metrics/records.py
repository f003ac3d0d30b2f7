"""Samples and episodes of the training steps of a run, in `records.jsonl` of its folder, for `tether view`.

Each line is a record: a JSON object that begins with its own size in bytes, its step and its kind, so that a reader
finds one record among gigabytes by skipping from head to head::

    {"bytes":        152, "step": 40, "kind": "tokens", ...}

Arrays are `{"dtype": ..., "shape": ..., "data": base64}`. The file is only appended to. A run that resumes from step N
truncates it before the first record of a later step; an incomplete record left by a crash is ignored and truncated.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tether.types import JsonObject

logger = logging.getLogger(__name__)

RECORDS_FILE = "records.jsonl"
HEAD = re.compile(rb'\{"bytes": *(\d+), "step": (\d+), "kind": "(\w+)"')
HEAD_BYTES = 80
"""Maximum bytes of the head that `HEAD` matches."""
MAX_TIME_SHARE = 0.01
"""Maximum share of a run's time that recording may take."""
FREE_STEPS = 10
"""First steps, which are always recorded, so that short runs are recorded completely."""


@dataclass(frozen=True)
class RecordHead:
    """Position, step and kind of a record."""

    offset: int
    size: int
    step: int
    kind: str


def pack(array: NDArray[np.generic]) -> JsonObject:
    """Return an array as JSON; byte arrays, such as images, are compressed."""
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    packed: JsonObject = {"dtype": array.dtype.str, "shape": list(array.shape)}
    data = array.tobytes()
    if array.dtype == np.uint8:
        packed["zlib"], data = True, zlib.compress(data, 1)
    packed["data"] = base64.b64encode(data).decode()
    return packed


def unpack(packed: JsonObject) -> NDArray[np.generic]:
    """Return the array encoded by `pack`."""
    data = base64.b64decode(packed["data"])
    if packed.get("zlib"):
        data = zlib.decompress(data)
    return np.frombuffer(data, dtype=np.dtype(packed["dtype"])).reshape(packed["shape"])


def heads(path: Path, start: int = 0) -> Iterator[RecordHead]:
    """Yield the heads of the complete records of a file from an offset on, without reading their contents."""
    if not path.exists():
        return
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while start < size:
            match = HEAD.match(os.pread(file.fileno(), HEAD_BYTES, start))
            if match is None or start + int(match[1]) > size:
                return
            yield RecordHead(start, int(match[1]), int(match[2]), match[3].decode())
            start += int(match[1])


def read_record(path: Path, head: RecordHead) -> JsonObject:
    """Return the content of a record.

    Raises:
        ValueError: the content is not JSON.
    """
    with path.open("rb", buffering=0) as file:
        data = os.pread(file.fileno(), head.size, head.offset)
    record: JsonObject = json.loads(data.decode(errors="replace"))
    return record


class RecordFile:
    """Appends records within a budget of bytes per step and of time; a failure ends the recording but not the run.

    Args:
        folder: folder of the run.
        max_bytes: maximum bytes per step; 0 records nothing.
        resumed_step: step of the checkpoint that the run resumes from; None for a fresh run, which moves the file of an
            earlier run aside.
    """

    def __init__(self, folder: Path, max_bytes: int, resumed_step: int | None) -> None:
        self.max_bytes = max_bytes
        self.seconds = 0.0
        """CPU seconds spent on recording so far."""
        self._path, self._failed = folder / RECORDS_FILE, False
        self._started: float | None = None
        """Time at which the first step began."""
        self._recorded = 0
        """Number of steps that were recorded."""
        try:
            self._begin(resumed_step)
        except OSError as error:
            self._give_up(error)

    def _begin(self, resumed_step: int | None) -> None:
        if not self._path.exists():
            return
        if resumed_step is None:
            number = 1
            while (aside := self._path.with_name(f"{RECORDS_FILE}.{number}")).exists():
                number += 1
            self._path.rename(aside)
            return
        end = 0
        for head in heads(self._path):
            if head.step > resumed_step:
                break
            end = head.offset + head.size
        os.truncate(self._path, end)

    @property
    def is_due(self) -> bool:
        """Return whether to record the next step; after the first steps, recording stays below 1 % of the time."""
        self._started = self._started or time.monotonic()  # called when the first step begins
        limit = MAX_TIME_SHARE * (time.monotonic() - self._started)
        return bool(self.max_bytes) and not self._failed and (self._recorded < FREE_STEPS or self.seconds <= limit)

    @contextmanager
    def recording(self, step: int) -> Iterator[Callable[[str, Mapping[str, object]], int]]:
        """Yield a function that adds a record to the step and returns its size in bytes.

        The records are written together when the block ends.
        """
        began, lines = time.thread_time(), list[bytes]()

        def add(kind: str, content: Mapping[str, object]) -> int:
            lines.append(_line(step, kind, content))
            return len(lines[-1])

        try:
            yield add
            self._append(b"".join(lines))
        except Exception as error:  # noqa: BLE001  a full disk or a tokenizer that fails must not end the run
            self._give_up(error)
        finally:
            self.seconds += time.thread_time() - began
            self._recorded += 1

    def _append(self, data: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(start)
                raise

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        logger.warning(
            "%s: samples are not recorded any more, as recording failed (%s: %s); the run continues. To switch it off: "
            "trainer.record_mb=0",
            self._path,
            type(error).__name__,
            error,
        )


def _line(step: int, kind: str, content: Mapping[str, object]) -> bytes:
    body = json.dumps(content, ensure_ascii=False, default=str)[1:].encode(errors="backslashreplace")
    head = f', "step": {step}, "kind": "{kind}"{", " if content else ""}'.encode()
    size = len(b'{"bytes": ') + 12 + len(head) + len(body) + 1
    return b'{"bytes": %12d' % size + head + body + b"\n"
