"""Reads and writes datasets of episodes in LeRobot's format.

Datasets are written in version 2.1, with one parquet file per episode, and images as PNG::

    meta/info.json             version, counts, features
    meta/tasks.jsonl           index -> text of each task
    meta/episodes.jsonl        length and tasks of each episode
    meta/episodes_stats.jsonl  minimum, maximum, mean and standard deviation of each feature
    data/chunk-000/episode_000000.parquet

Versions 2.0, 2.1 and 3.0, which packs several episodes into a file, can be read. Videos are not supported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet

from tether.integrations.robots.demonstrations import TASK, Demonstration
from tether.integrations.robots.lerobot_columns import png, read_columns
from tether.integrations.robots.lerobot_meta import (
    ACTION,
    DONE,
    EPISODE,
    FRAME,
    OBSERVATION,
    REWARD,
    SUCCESS,
    TASK_INDEX,
    VERSION,
    Meta,
    read_meta,
)
from tether.observations import Array
from tether.types import JsonObject

DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
CHUNK = 1000


def write_dataset(folder: Path, episodes: Iterable[Demonstration], *, fps: int, robot: str) -> int:
    """Write episodes as they arrive, and return their number.

    Args:
        folder: a new or empty folder.
        episodes: episodes with the same observations and actions.
        fps: steps per second.
        robot: name of the embodiment or environment; also the task of episodes that have none.

    Raises:
        ValueError: the folder is not empty, or there are no episodes.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: holds files already. Name a new folder.")
    meta = folder / "meta"
    meta.mkdir(parents=True, exist_ok=True)
    tasks: dict[str, int] = {}
    frames, lengths, features = 0, list[int](), JsonObject()
    with (meta / "episodes.jsonl").open("w") as listed, (meta / "episodes_stats.jsonl").open("w") as measured:
        for index, episode in enumerate(episodes):
            columns = _columns(episode, index, frames, fps, tasks, robot)
            features = {name: _feature(column) for name, column in columns.items()}
            path = folder / DATA_PATH.format(episode_chunk=index // CHUNK, episode_index=index)
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_parquet(path, columns, features)
            done = [text for text, task in tasks.items() if task in columns["task_index"]]
            _line(listed, {"episode_index": index, "tasks": done, "length": len(episode)})
            stats = {name: _stats(column) for name, column in columns.items()}
            _line(measured, {"episode_index": index, "stats": stats})
            frames += len(episode)
            lengths.append(len(episode))
    if not lengths:
        raise ValueError(f"{folder}: no episode to write")
    with (meta / "tasks.jsonl").open("w") as listed:
        for text, task in tasks.items():
            _line(listed, {"task_index": task, "task": text})
    count = len(lengths)
    info = {
        "codebase_version": VERSION, "robot_type": robot, "total_episodes": count, "total_frames": frames,
        "total_tasks": len(tasks), "total_videos": 0, "total_chunks": (count - 1) // CHUNK + 1, "chunks_size": CHUNK,
        "fps": fps, "splits": {"train": f"0:{count}"}, "data_path": DATA_PATH, "video_path": None,
        "features": features,
    }  # fmt: skip
    (meta / "info.json").write_text(json.dumps(info, indent=4))
    return count


def read_dataset(folder: Path) -> list[Demonstration]:
    """Read all episodes, in order.

    Raises:
        ValueError: the version is not supported, there are videos, a value is not finite, or the files are inconsistent
            in the episodes, their lengths, types or shapes.
    """
    meta = read_meta(folder)
    files = sorted((folder / "data").rglob("*.parquet"))
    if not files:
        raise ValueError(f"{folder / 'data'}: no parquet files here, though {folder / 'meta'} describes some")
    tables = [read_columns(file, meta) for file in files]
    columns = {name: np.concatenate([table[name] for table in tables]) for name in meta.features}
    order = np.lexsort((columns[FRAME], columns[EPISODE]))
    columns = {name: column[order] for name, column in columns.items()}
    ends = np.cumsum([len(table[FRAME]) for table in tables])

    def locate(frame: int) -> str:
        """Return the file and row of a frame."""
        i = int(np.searchsorted(ends, order[frame], side="right"))
        return f"{files[i]}: row {order[frame] - (ends[i - 1] if i else 0)}"

    columns[TASK] = _tasks(columns[TASK_INDEX], meta, locate)
    numbers, starts = np.unique(columns[EPISODE], return_index=True)
    stops = [*starts[1:], len(order)]
    for index, start, stop in zip(numbers, starts, stops, strict=True):
        _check_frames(int(index), columns[FRAME][start:stop], int(start), locate)
    _check_lengths(folder, meta, dict(zip(numbers.tolist(), (stops - starts).tolist(), strict=True)))
    episodes = [
        _episode({name: column[start:stop] for name, column in columns.items()})
        for start, stop in zip(starts, stops, strict=True)
    ]
    for index, episode in zip(numbers, episodes, strict=True):
        _check_finite(episode, folder, int(index))
    return episodes


# --- writing ------------------------------------------------------------------------------------------------------


def _columns(
    episode: Demonstration, index: int, frames: int, fps: int, tasks: dict[str, int], robot: str
) -> dict[str, Array]:
    """Return all columns of an episode, and add new tasks to `tasks`."""
    steps = np.arange(len(episode))
    texts = episode.observations.get(TASK, np.full(len(episode), robot)).tolist()
    columns = {OBSERVATION + name: values for name, values in episode.observations.items() if name != TASK}
    columns |= {ACTION: episode.actions, REWARD: episode.rewards, DONE: steps == len(episode) - 1}
    if episode.success is not None:
        columns[SUCCESS] = episode.success
    task = np.array([tasks.setdefault(text, len(tasks)) for text in texts])
    return columns | {
        "timestamp": (steps / fps).astype(np.float32),
        "frame_index": steps,
        "episode_index": np.full(len(episode), index),
        "index": frames + steps,
        "task_index": task,
    }


def _feature(column: Array) -> JsonObject:
    if _is_picture(column):
        return {"dtype": "image", "shape": list(column.shape[1:]), "names": ["height", "width", "channels"]}
    return {"dtype": str(column.dtype), "shape": list(column.shape[1:]) or [1], "names": None}


def _write_parquet(path: Path, columns: Mapping[str, Array], features: JsonObject) -> None:
    # LeRobot recognises images by the schema of the `datasets` library.
    schema: pyarrow.Schema = datasets.Features(
        {name: _arrow_feature(feature) for name, feature in features.items()}
    ).arrow_schema
    cells = {
        name: [{"bytes": png().encode_png(picture), "path": f"frame_{t:06d}.png"} for t, picture in enumerate(column)]
        if _is_picture(column)
        else (column[:, 0] if column.shape[1:] == (1,) else column).tolist()
        for name, column in columns.items()
    }
    pyarrow.parquet.write_table(pyarrow.table(cells, schema=schema), path)


def _arrow_feature(feature: JsonObject) -> Any:
    if feature["dtype"] == "image":
        return datasets.Image()
    value = datasets.Value(feature["dtype"])
    return value if feature["shape"] == [1] else datasets.Sequence(value, length=feature["shape"][0])


def _stats(column: Array) -> dict[str, list[float]]:
    values = column.astype(np.float64)
    if _is_picture(column):  # per channel, in [0, 1], with the shape [C, 1, 1]
        values = values.reshape(-1, column.shape[-1]) / 255
        stats = {name: getattr(values, name)(axis=0)[:, None, None].tolist() for name in ("min", "max", "mean", "std")}
    else:
        values = values.reshape(len(values), -1)
        stats = {name: getattr(values, name)(axis=0).tolist() for name in ("min", "max", "mean", "std")}
    return stats | {"count": [len(column)]}


def _is_picture(column: Array) -> bool:
    return column.dtype == np.uint8 and column.ndim == 4


def _line(file: Any, value: JsonObject) -> None:
    file.write(json.dumps(value) + "\n")


# --- reading ------------------------------------------------------------------------------------------------------


def _tasks(numbers: Array, meta: Meta, locate: Callable[[int], str]) -> Array:
    """Return the task's text for each frame."""
    for index, first in zip(*np.unique(numbers, return_index=True), strict=True):
        if index not in meta.tasks:
            what = f"{TASK_INDEX}={index} is none of the {len(meta.tasks)} tasks that the folder meta lists"
            raise ValueError(f"{locate(int(first))}: {what}. Add it there.")
    return np.array([meta.tasks[index] for index in numbers.tolist()])


def _check_frames(index: int, frames: Array, start: int, locate: Callable[[int], str]) -> None:
    """Refuse an episode whose frames are not numbered 0, 1, 2, ...; `start` is its first frame in the dataset."""
    wrong = np.flatnonzero(frames != np.arange(len(frames)))
    if not len(wrong):
        return
    i = int(wrong[0])
    if i and frames[i] == frames[i - 1]:
        what = f"{FRAME}={frames[i]} of episode {index} is in {locate(start + i - 1)}, too"
        raise ValueError(f"{locate(start + i)}: {what}. Take one away, or give each episode a number of its own.")
    what = f"{FRAME}={frames[i]} where frame {i} of episode {index} is expected"
    raise ValueError(f"{locate(start + i)}: {what}. Fetch the file again, or leave the episode out.")


def _check_lengths(folder: Path, meta: Meta, lengths: Mapping[int, int]) -> None:
    """Refuse episodes whose lengths differ from the dataset's metadata."""
    fix = "Fetch the dataset again, or correct the number."
    listed = lengths if meta.lengths is None else meta.lengths
    for index in sorted(lengths.keys() | listed.keys()):
        length, rows = listed.get(index, 0), lengths.get(index, 0)
        if length != rows:
            what = f"episode {index} has {length} frames, and {rows} rows in {folder / 'data'}"
            raise ValueError(f"{meta.listed}: {what}. {fix}")
    totals = {"total_episodes": len(lengths), "total_frames": sum(lengths.values())}
    for name, total in meta.totals.items():
        if total != totals[name]:
            what = f"{name}={total!r}, but {totals[name]} are in {folder / 'data'}"
            raise ValueError(f"{folder / 'meta' / 'info.json'}: {what}. {fix}")


def _episode(columns: Mapping[str, Array]) -> Demonstration:
    names = [name for name in columns if name.startswith(OBSERVATION)]
    observations = {name.removeprefix(OBSERVATION): columns[name] for name in names}
    rewards = columns.get(REWARD, np.zeros(len(columns[ACTION])))
    return Demonstration(
        observations | {TASK: columns[TASK]}, columns[ACTION], rewards.astype(np.float32), columns.get(SUCCESS)
    )


def _check_finite(episode: Demonstration, folder: Path, index: int) -> None:
    """Refuse values that are not finite, before a policy is trained on them."""
    numbers = {name: values for name, values in episode.observations.items() if values.dtype.kind == "f"}
    for name, column in (numbers | {ACTION: episode.actions}).items():
        bad = np.argwhere(~np.isfinite(column))
        if len(bad):
            t, entry = bad[0]
            raise ValueError(
                f"{folder}: episode {index}, frame {t}: entry {entry} of {name} is {column[t, entry]}. "
                "Leave the episode out."
            )
