"""Reads the folder `meta` of a dataset in LeRobot's format: features, tasks and episode lengths."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from tether.integrations.robots.demonstrations import TASK
from tether.types import JsonObject

VERSION, READABLE = "v2.1", ("v2.0", "v2.1", "v3.0")
OBSERVATION, ACTION, REWARD, DONE, SUCCESS = "observation.", "action", "next.reward", "next.done", "next.success"
EPISODE, FRAME, TASK_INDEX = "episode_index", "frame_index", "task_index"
IMAGE = "image"
AGAIN = "Fetch the dataset again, or correct the file."


@dataclass(frozen=True)
class Feature:
    """A column as `info.json` describes it."""

    dtype: str
    """Name of a NumPy dtype, or `image`."""
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Number of values per frame."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Meta:
    """Metadata of a dataset."""

    features: Mapping[str, Feature]
    """The columns to read."""
    tasks: Mapping[int, str]
    """Index -> text of each task."""
    lengths: Mapping[int, int] | None
    """Episode -> number of frames; None: the dataset does not list its episodes."""
    listed: Path
    """The file or folder that lists the episodes."""
    totals: Mapping[str, object]
    """`total_episodes` and `total_frames`, if present."""


def read_meta(folder: Path) -> Meta:
    """Read and check the metadata of a dataset.

    Raises:
        ValueError: a file is missing or broken, the version is not supported, or there are videos.
    """
    file = folder / "meta" / "info.json"
    if not file.is_file():
        raise ValueError(
            f"{folder}: no dataset of episodes here (meta/info.json is missing). `tether collect` makes one."
        )
    info = _parsed(file.read_bytes(), str(file))
    version = info.get("codebase_version")
    if version not in READABLE:
        raise ValueError(f"{file}: codebase_version={version}, but only {', '.join(READABLE)} are read. Convert it.")
    written = info.get("features")
    if not isinstance(written, dict):
        raise ValueError(f"{file}: features={written!r} describes no columns. {AGAIN}")
    features = {name: _feature(name, feature, file) for name, feature in written.items() if _is_read(name)}
    for name in (ACTION, EPISODE, FRAME, TASK_INDEX):
        if name not in features:
            raise ValueError(f"{file}: features has no {name}. {AGAIN}")
    totals: dict[str, object] = {name: info[name] for name in ("total_episodes", "total_frames") if name in info}
    lines, files = file.with_name("episodes.jsonl"), file.with_name("episodes")  # version 3.0 has the second one
    listed = lines if lines.is_file() else files
    return Meta(features, _tasks(folder / "meta"), _lengths(listed), listed, totals)


def read_parquet(file: Path, names: Collection[str]) -> dict[str, list[object]]:
    """Read the cells of these columns; columns that the file lacks are omitted.

    Raises:
        ValueError: the file is broken.
    """
    try:
        table = pyarrow.parquet.read_table(file, partitioning=None)
        return {name: table[name].to_pylist() for name in table.column_names if name in names}
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: no readable parquet file ({str(error).splitlines()[0]}). Fetch it again.") from error


def _is_read(name: str) -> bool:
    return name.startswith(OBSERVATION) or name in (ACTION, REWARD, SUCCESS, EPISODE, FRAME, TASK_INDEX)


def _feature(name: str, written: object, file: Path) -> Feature:
    where = f"{file}: features.{name}"
    if not isinstance(written, dict):
        raise ValueError(f"{where}={written!r} is no object with dtype and shape. {AGAIN}")
    dtype, shape = written.get("dtype"), written.get("shape")
    if dtype == "video":
        raise ValueError(f"{where} is stored as videos. Store its pictures in the parquet files instead.")
    if dtype != IMAGE and not _is_number_type(dtype):
        raise ValueError(f"{where}.dtype={dtype!r} is no type of numbers, as float32, nor image. {AGAIN}")
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"{where}.shape={shape!r} is no list of sizes, as [2]. {AGAIN}")
    return Feature(str(dtype), tuple(shape))


def _is_number_type(dtype: object) -> bool:
    try:
        return isinstance(dtype, str) and np.dtype(dtype).kind in "biuf"
    except TypeError:
        return False


def _tasks(meta: Path) -> dict[int, str]:
    """Read the text of each task by its index."""
    lines, table = meta / "tasks.jsonl", meta / "tasks.parquet"
    if lines.is_file():
        rows = list(_lines(lines))
    elif table.is_file():  # version 3.0: the text is the pandas index
        table_rows = _rows(table, (TASK_INDEX, TASK, "__index_level_0__"))
        rows = [(where, {TASK: row.get("__index_level_0__"), **row}) for where, row in table_rows]
    else:
        raise ValueError(f"{lines}: missing, and so is {table.name}: they name the tasks. Fetch the dataset again.")
    tasks: dict[int, str] = {}
    for where, row in rows:
        index, text = row.get(TASK_INDEX), row.get(TASK)
        if type(index) is not int or not isinstance(text, str):
            raise ValueError(f"{where}: {row} has no whole {TASK_INDEX} and text {TASK}. {AGAIN}")
        if tasks.setdefault(index, text) != text:
            raise ValueError(f"{where}: {TASK_INDEX}={index} is {text!r} here and {tasks[index]!r} before. {AGAIN}")
    return tasks


def _lengths(listed: Path) -> dict[int, int] | None:
    """Read the number of frames of each episode from a file of JSON lines or a folder of parquet files."""
    if listed.is_file():
        rows = list(_lines(listed))
    elif files := sorted(listed.rglob("*.parquet")):
        rows = [row for file in files for row in _rows(file, (EPISODE, "length"))]
    else:
        return None
    lengths: dict[int, int] = {}
    for where, row in rows:
        number, length = row.get(EPISODE), row.get("length")
        if type(number) is not int or type(length) is not int:
            raise ValueError(f"{where}: {EPISODE}={number!r}, length={length!r} are no whole numbers. {AGAIN}")
        if number in lengths:
            raise ValueError(f"{where}: {EPISODE}={number} stands there twice. Give each episode a number of its own.")
        lengths[number] = length
    return lengths


def _lines(file: Path) -> Iterator[tuple[str, JsonObject]]:
    """Yield the rows of a file of JSON lines, each with its location."""
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if line.strip():
            yield f"{file}: line {number}", _parsed(line, f"{file}: line {number}")


def _rows(file: Path, names: Collection[str]) -> Iterator[tuple[str, JsonObject]]:
    """Yield the rows of a parquet file, each with its location."""
    cells = read_parquet(file, names)
    for number, row in enumerate(zip(*cells.values(), strict=True)):
        yield f"{file}: row {number}", dict(zip(cells, row, strict=True))


def _parsed(text: bytes, where: str) -> JsonObject:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: cannot be read as JSON ({error}). {AGAIN}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {text[:40].decode(errors='replace')!r} is no object of JSON. {AGAIN}")
    return value
