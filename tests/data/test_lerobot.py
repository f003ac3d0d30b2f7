"""Datasets of episodes: written and read again, in LeRobot's layout, with what is wrong named."""

import json

import numpy as np
import pyarrow.parquet
import pytest
from datasets import Image, load_dataset

from tether.data.demonstrations import Demonstration
from tether.data.lerobot import read_dataset, write_dataset

pytest.importorskip("PIL")


def demonstration(steps=4, seed=0, *, task="reach red", whole=False, success=True, width=2):
    rng = np.random.default_rng(seed)
    return Demonstration(
        {
            "image": rng.integers(256, size=(steps, 6, 5, 3)).astype(np.uint8),
            "state": rng.normal(size=(steps, 3)).astype(np.float32),
            "task": np.array([task] * steps),
        },
        rng.integers(5, size=(steps, width)) if whole else rng.normal(size=(steps, width)).astype(np.float32),
        rng.normal(size=steps).astype(np.float32),
        rng.random(steps) > 0.5 if success else None,
    )


def same(a, b):
    assert sorted(a.observations) == sorted(b.observations)
    for name, part in a.observations.items():
        assert part.dtype.kind == b.observations[name].dtype.kind
        assert np.array_equal(part, b.observations[name]), name
    assert a.actions.dtype.kind == b.actions.dtype.kind
    assert np.array_equal(a.actions, b.actions)
    assert np.array_equal(a.rewards, b.rewards)
    assert (a.success is None) == (b.success is None)
    return a.success is None or np.array_equal(a.success, b.success)


@pytest.mark.parametrize("options", [{}, {"whole": True, "success": False}, {"width": 1}])
def test_written_and_read(options, tmp_path):
    episodes = [demonstration(3 + k, k, task=("reach red", "reach blue")[k % 2], **options) for k in range(3)]
    assert write_dataset(tmp_path, episodes, fps=10, robot="arm") == 3
    assert all(same(a, b) for a, b in zip(episodes, read_dataset(tmp_path), strict=True))


def test_the_layout_is_lerobots(tmp_path):
    write_dataset(tmp_path, [demonstration(3), demonstration(5, 1, task="reach blue")], fps=10, robot="arm")
    info = json.loads((tmp_path / "meta/info.json").read_text())
    assert (info["codebase_version"], info["total_episodes"], info["total_frames"]) == ("v2.1", 2, 8)
    assert info["features"]["observation.image"] == {
        "dtype": "image",
        "shape": [6, 5, 3],
        "names": ["height", "width", "channels"],
    }
    assert info["features"]["action"]["dtype"] == "float32"
    lines = (tmp_path / "meta/episodes.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {"episode_index": 1, "tasks": ["reach blue"], "length": 5}
    stats = json.loads((tmp_path / "meta/episodes_stats.jsonl").read_text().splitlines()[0])["stats"]
    assert np.shape(stats["observation.image"]["mean"]) == (3, 1, 1)
    assert np.max(stats["observation.image"]["max"]) <= 1
    table = pyarrow.parquet.read_table(tmp_path / "data/chunk-000/episode_000001.parquet").to_pydict()
    assert table["index"] == [3, 4, 5, 6, 7]
    assert table["next.done"] == [False] * 4 + [True]
    np.testing.assert_allclose(table["timestamp"], np.arange(5) / 10, rtol=1e-6)
    # What LeRobot itself reads the files with:
    loaded = load_dataset("parquet", data_dir=str(tmp_path / "data"), split="train", cache_dir=str(tmp_path / "cache"))
    assert isinstance(loaded.features["observation.image"], Image)
    assert loaded[0]["observation.image"].size == (5, 6)


def test_version_3_packs_episodes_into_a_file(tmp_path):
    """Made by hand: one file of all episodes, tasks as pandas writes an index."""
    episodes = [demonstration(3), demonstration(4, 1, task="reach blue")]
    write_dataset(tmp_path, episodes, fps=10, robot="arm")
    parts = sorted((tmp_path / "data").rglob("*.parquet"))
    table = pyarrow.concat_tables([pyarrow.parquet.read_table(part) for part in parts])
    for part in parts:
        part.unlink()
    pyarrow.parquet.write_table(table, tmp_path / "data/chunk-000/file-000.parquet")
    info_file = tmp_path / "meta/info.json"
    info_file.write_text(info_file.read_text().replace('"v2.1"', '"v3.0"'))
    (tmp_path / "meta/tasks.jsonl").unlink()
    tasks = pyarrow.table({"task_index": [0, 1], "__index_level_0__": ["reach red", "reach blue"]})
    pyarrow.parquet.write_table(tasks, tmp_path / "meta/tasks.parquet")
    assert all(same(a, b) for a, b in zip(episodes, read_dataset(tmp_path), strict=True))


def change(folder, edit):
    path = folder / "meta/info.json"
    info = json.loads(path.read_text())
    edit(info)
    path.write_text(json.dumps(info))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda info: info.update(codebase_version="v1.6"), r"codebase_version=v1\.6, but only v2\.0, v2\.1, v3\.0"),
        (lambda info: info["features"]["observation.image"].update(dtype="video"), r"image is stored as videos"),
    ],
)
def test_what_cannot_be_read_is_named(edit, message, tmp_path):
    write_dataset(tmp_path, [demonstration()], fps=10, robot="arm")
    change(tmp_path, edit)
    with pytest.raises(ValueError, match=message):
        read_dataset(tmp_path)


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no dataset of episodes here"):
        read_dataset(tmp_path)
    with pytest.raises(ValueError, match=r"no episode to write"):
        write_dataset(tmp_path / "none", [], fps=10, robot="arm")
    write_dataset(tmp_path / "full", [demonstration()], fps=10, robot="arm")
    with pytest.raises(ValueError, match=r"full: holds files already"):
        write_dataset(tmp_path / "full", [demonstration()], fps=10, robot="arm")


def test_a_number_that_is_not_finite_is_named(tmp_path):
    broken = demonstration(5, 1)
    broken.actions[2, 1] = np.nan
    write_dataset(tmp_path, [demonstration(), broken], fps=10, robot="arm")
    with pytest.raises(ValueError, match=r"episode 1, frame 2: entry 1 of action is nan"):
        read_dataset(tmp_path)
