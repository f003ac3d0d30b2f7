"""Datasets of episodes on the disk, in LeRobot's layout.

Written as its version 2.1, one parquet file an episode, pictures as PNG inside of it::

    meta/info.json             version, counts, features
    meta/tasks.jsonl           number -> text of each task
    meta/episodes.jsonl        length and tasks of each episode
    meta/episodes_stats.jsonl  minimum, maximum, mean and standard deviation of each feature
    data/chunk-000/episode_000000.parquet

Read as 2.0, 2.1 or 3.0, which packs several episodes into a file; pictures that are stored as videos are not.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet

from tether.data.demonstrations import TASK, Demonstration
from tether.observations import Array
from tether.types import JsonObject

VERSION, READABLE = "v2.1", ("v2.0", "v2.1", "v3.0")
DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
CHUNK = 1000
OBSERVATION, ACTION, REWARD, DONE, SUCCESS = "observation.", "action", "next.reward", "next.done", "next.success"
COUNTERS = ("frame_index", "episode_index", "index", "task_index")


def write_dataset(folder: Path, episodes: Iterable[Demonstration], *, fps: int, robot: str) -> int:
    """Write episodes as they come; returns how many.

    Args:
        folder: new, or empty.
        episodes: all with the same observations and actions.
        fps: steps a second.
        robot: name of the embodiment, or of the environment; also the task where episodes name none.

    Raises:
        ValueError: there are files in the folder, or no episode came.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: holds files already. Name a new folder.")
    meta = folder / "meta"
    meta.mkdir(parents=True, exist_ok=True)
    tasks: dict[str, int] = {}
    frames, lengths, features = 0, list[int](), JsonObject()
    with (meta / "episodes.jsonl").open("w") as listed, (meta / "episodes_stats.jsonl").open("w") as measured:
        for number, episode in enumerate(episodes):
            columns = _columns(episode, number, frames, fps, tasks, robot)
            features = {name: _feature(column) for name, column in columns.items()}
            path = folder / DATA_PATH.format(episode_chunk=number // CHUNK, episode_index=number)
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_parquet(path, columns, features)
            done = [text for text, task in tasks.items() if task in columns["task_index"]]
            _line(listed, {"episode_index": number, "tasks": done, "length": len(episode)})
            stats = {name: _stats(column) for name, column in columns.items()}
            _line(measured, {"episode_index": number, "stats": stats})
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
        ValueError: it is no such dataset, of another version, with videos, or holds a number that is not finite.
    """
    info_file = folder / "meta" / "info.json"
    if not info_file.is_file():
        raise ValueError(
            f"{folder}: no dataset of episodes here (meta/info.json is missing). `tether collect` makes one."
        )
    info = json.loads(info_file.read_text())
    if info["codebase_version"] not in READABLE:
        raise ValueError(
            f"{info_file}: codebase_version={info['codebase_version']}, but only {', '.join(READABLE)} are read"
        )
    features = info["features"]
    for name, feature in features.items():
        if feature["dtype"] == "video":
            raise ValueError(
                f"{info_file}: {name} is stored as videos. Store its pictures in the parquet files instead."
            )
    files = sorted((folder / "data").rglob("*.parquet"))
    if not files:
        raise ValueError(f"{folder / 'data'}: no parquet files here, though {info_file} describes some")
    table = pyarrow.concat_tables([pyarrow.parquet.read_table(file).replace_schema_metadata() for file in files])
    table = table.sort_by([("episode_index", "ascending"), ("frame_index", "ascending")])
    columns = {name: _read_column(table, name, feature) for name, feature in features.items()}
    if any(feature["dtype"] == "image" for feature in features.values()):
        columns |= _pictures(table, features)
    columns[TASK] = _read_tasks(folder / "meta")[columns["task_index"]]
    starts = np.flatnonzero(np.diff(columns["episode_index"], prepend=-1))
    bounds = zip(starts, [*starts[1:], len(table)], strict=True)
    episodes = [_episode({name: column[start:stop] for name, column in columns.items()}) for start, stop in bounds]
    for number, episode in enumerate(episodes):
        _check(episode, folder, number)
    return episodes


# --- writing ------------------------------------------------------------------------------------------------------


def _columns(
    episode: Demonstration, number: int, frames: int, fps: int, tasks: dict[str, int], robot: str
) -> dict[str, Array]:
    """All columns of an episode; new tasks are added to `tasks`."""
    steps = np.arange(len(episode))
    texts = episode.observations.get(TASK, np.full(len(episode), robot)).tolist()
    columns = {OBSERVATION + name: part for name, part in episode.observations.items() if name != TASK}
    columns |= {ACTION: episode.actions, REWARD: episode.rewards, DONE: steps == len(episode) - 1}
    if episode.success is not None:
        columns[SUCCESS] = episode.success
    task = np.array([tasks.setdefault(text, len(tasks)) for text in texts])
    return columns | {
        "timestamp": (steps / fps).astype(np.float32),
        "frame_index": steps,
        "episode_index": np.full(len(episode), number),
        "index": frames + steps,
        "task_index": task,
    }


def _feature(column: Array) -> JsonObject:
    if _is_picture(column):
        return {"dtype": "image", "shape": list(column.shape[1:]), "names": ["height", "width", "channels"]}
    return {"dtype": str(column.dtype), "shape": list(column.shape[1:]) or [1], "names": None}


def _write_parquet(path: Path, columns: Mapping[str, Array], features: JsonObject) -> None:
    # The schema that the library `datasets` gives: by it, LeRobot knows which columns are pictures.
    schema: pyarrow.Schema = datasets.Features(
        {name: _arrow_feature(feature) for name, feature in features.items()}
    ).arrow_schema
    cells = {
        name: [{"bytes": _png().encode_png(picture), "path": f"frame_{t:06d}.png"} for t, picture in enumerate(column)]
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
    if _is_picture(column):  # of each channel, from 0 to 1, as [C, 1, 1]
        values = values.reshape(-1, column.shape[-1]) / 255
        found = {name: getattr(values, name)(axis=0)[:, None, None].tolist() for name in ("min", "max", "mean", "std")}
    else:
        values = values.reshape(len(values), -1)
        found = {name: getattr(values, name)(axis=0).tolist() for name in ("min", "max", "mean", "std")}
    return found | {"count": [len(column)]}


def _is_picture(column: Array) -> bool:
    return column.dtype == np.uint8 and column.ndim == 4


def _line(file: Any, value: JsonObject) -> None:
    file.write(json.dumps(value) + "\n")


# --- reading ------------------------------------------------------------------------------------------------------


def _read_column(table: pyarrow.Table, name: str, feature: JsonObject) -> Array:
    """A column [T, ...] of numbers; nothing yet of a picture."""
    if feature["dtype"] == "image":
        return np.zeros(len(table))
    if name in COUNTERS or name in (REWARD, DONE, SUCCESS, "timestamp"):
        return np.array(table[name].to_pylist(), dtype=feature["dtype"]).reshape(len(table))
    return np.array(table[name].to_pylist(), dtype=feature["dtype"]).reshape(len(table), -1)


def _pictures(table: pyarrow.Table, features: JsonObject) -> dict[str, Array]:
    decode = _png().decode_png
    return {
        name: np.stack([decode(cell["bytes"]) for cell in table[name].to_pylist()])
        for name, feature in features.items()
        if feature["dtype"] == "image"
    }


def _read_tasks(meta: Path) -> Array:
    """The text of each task by its number."""
    if (meta / "tasks.jsonl").is_file():
        rows = [json.loads(line) for line in (meta / "tasks.jsonl").read_text().splitlines()]
    else:  # version 3.0: the text is pandas' index
        rows = pyarrow.parquet.read_table(meta / "tasks.parquet").to_pylist()
        rows = [{"task": row.get(TASK, row.get("__index_level_0__")), **row} for row in rows]
    return np.array([row["task"] for row in sorted(rows, key=lambda row: row["task_index"])])


def _episode(columns: Mapping[str, Array]) -> Demonstration:
    names = [name for name in columns if name.startswith(OBSERVATION)]
    observations = {name.removeprefix(OBSERVATION): columns[name] for name in names}
    rewards = columns.get(REWARD, np.zeros(len(columns[ACTION])))
    return Demonstration(
        observations | {TASK: columns[TASK]}, columns[ACTION], rewards.astype(np.float32), columns.get(SUCCESS)
    )


def _check(episode: Demonstration, folder: Path, number: int) -> None:
    """Refuse a number that is not finite, so that no policy learns from it."""
    numbers = {name: part for name, part in episode.observations.items() if part.dtype.kind == "f"}
    for name, column in (numbers | {ACTION: episode.actions}).items():
        bad = np.argwhere(~np.isfinite(column))
        if len(bad):
            t, entry = bad[0]
            raise ValueError(
                f"{folder}: episode {number}, frame {t}: entry {entry} of {name} is {column[t, entry]}. "
                "Leave the episode out."
            )


def _png() -> ModuleType:
    try:
        return importlib.import_module("tether.data.png")
    except ModuleNotFoundError as error:
        raise ValueError("pictures need the package Pillow. Run: pip install 'tether[vla]'") from error
