"""Datasets of episodes: written and read again, in LeRobot's layout, with what is wrong named."""

import contextlib
import json
from io import BytesIO

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.integrations.robots.demonstrations import Demonstration
from tether.integrations.robots.lerobot import read_dataset, write_dataset

PILLOW = pytest.importorskip("PIL.Image")

from tether.integrations.robots.png import decode_png  # noqa: E402


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
    from datasets import Image, load_dataset  # what LeRobot itself reads the files with

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


# --- broken datasets ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Four episodes of five frames."""
    write_dataset(tmp_path / "set", [demonstration(5, k) for k in range(4)], fps=10, robot="arm")
    return tmp_path / "set"


def file_of(folder, episode=1):
    return folder / f"data/chunk-000/episode_{episode:06d}.parquet"


def rewrite(folder, edit, episode=1):
    pyarrow.parquet.write_table(edit(pyarrow.parquet.read_table(file_of(folder, episode))), file_of(folder, episode))


def put(folder, name, cells, kind=None):
    """Write other cells into a column of episode 1."""

    def edit(table):
        column = pyarrow.array(cells, kind or table.schema.field(name).type)
        return table.set_column(table.column_names.index(name), name, column)

    rewrite(folder, edit)


def refused(folder):
    with pytest.raises(ValueError) as caught:
        read_dataset(folder)
    assert type(caught.value) is ValueError
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


FLOATS = pyarrow.list_(pyarrow.float32())
PICTURE = "observation.image"


@pytest.mark.parametrize(
    ("name", "cells", "kind", "says"),
    [
        ("action", [[1.0, 2.0], [1.0, 2.0, 3.0], [1.0], [1.0, 2.0], [1.0, 2.0]], FLOATS,
         "row 1: action is [1.0, 2.0, 3.0], not 2 numbers"),
        ("action", [[1.0, 2.0, 3.0]] * 5, FLOATS, "row 0: action is [1.0, 2.0, 3.0], not 2 numbers"),
        ("action", [[1.0, 2.0]] * 4 + [[1.0, None]], FLOATS, "row 4: action is [1.0, None], not 2 numbers"),
        ("action", [["a", "b"]] * 5, pyarrow.list_(pyarrow.string()), "row 0: action is ['a', 'b'], not 2 numbers"),
        ("observation.state", [[1.0] * 3] * 2 + [None] * 3, FLOATS, "row 2: observation.state is None, not 3 numbers"),
        ("next.reward", [1.0, 1.0, None, 1.0, 1.0], None, "row 2: next.reward is None, not 1 numbers"),
        ("episode_index", [1, 1, 1, 1, None], None, "row 4: episode_index is None"),
        ("episode_index", [1.5] * 5, pyarrow.float64(), "row 0: episode_index is 1.5, no int64"),
        ("episode_index", [0] * 5, None, "row 0: frame_index=0 of episode 0 is in {0}: row 0, too"),
        ("episode_index", [1, 1, 1, 1, -1], None, "row 4: frame_index=4 where frame 0 of episode -1 is expected"),
        ("frame_index", [0, 1, 2, 3, 5], None, "row 4: frame_index=5 where frame 4 of episode 1 is expected"),
        ("frame_index", [1, 2, 3, 4, 5], None, "row 0: frame_index=1 where frame 0 of episode 1 is expected"),
        ("frame_index", [0, 1, 2, 2, 3], None, "row 3: frame_index=2 of episode 1 is in {1}: row 2, too"),
        ("task_index", [0, 0, 7, 0, 0], None, "row 2: task_index=7 is none of the 1 tasks"),
        (PICTURE, [{"bytes": b"nope", "path": "x"}] * 5, None, f"row 0: {PICTURE}: these 4 bytes are no readable"),
        (PICTURE, [{"bytes": None, "path": "x.png"}] * 5, None, f"row 0: {PICTURE} is {{{{'bytes': None, "),
        (PICTURE, [None] * 5, None, f"row 0: {PICTURE} is None, no bytes of a picture"),
        (PICTURE, [[1, 2]] * 5, pyarrow.list_(pyarrow.int64()), f"row 0: {PICTURE} is [1, 2], no bytes of a picture"),
    ],
)  # fmt: skip
def test_a_cell_that_is_not_as_described_is_named(folder, name, cells, kind, says):
    put(folder, name, cells, kind)
    assert f"{file_of(folder)}: " + says.format(file_of(folder, 0), file_of(folder, 1)) in refused(folder)


def test_a_picture_of_another_size_or_kind_is_named(folder):
    def png(size, mode):
        file = BytesIO()
        PILLOW.new(mode, size).save(file, "PNG")
        return [{"bytes": file.getvalue(), "path": "x"}] * 5

    put(folder, PICTURE, png((9, 6), "RGB"))
    assert f"{PICTURE}: a picture of shape [6, 9, 3], but [6, 5, 3] in meta/info.json" in refused(folder)
    put(folder, PICTURE, png((5, 6), "I;16"))
    assert f"{PICTURE}: a picture of mode I;16 is not read" in refused(folder)
    put(folder, PICTURE, png((6, 5), "RGB"))
    assert "a picture of shape [5, 6, 3], but [6, 5, 3]" in refused(folder)
    put(folder, PICTURE, png((5, 6), "P"))  # whose bytes are numbers of colours
    assert read_dataset(folder)[1].observations["image"].shape == (5, 6, 5, 3)
    change(folder, lambda info: info["features"][PICTURE].update(shape=[3, 6, 5]))
    assert read_dataset(folder)[1].observations["image"].shape == (5, 6, 5, 3)


@pytest.mark.parametrize("episodes", [[2], [3], [1, 2, 3]])
def test_an_episode_that_is_missing_is_named(folder, episodes):
    for episode in episodes:
        file_of(folder, episode).unlink()
    assert f"{folder}/meta/episodes.jsonl: episode {episodes[0]} has 5 frames, and 0 rows in" in refused(folder)
    (folder / "meta/episodes.jsonl").unlink()
    assert f"{folder}/meta/info.json: total_episodes=4, but {4 - len(episodes)} are in" in refused(folder)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda table: table.slice(0, 2), "episodes.jsonl: episode 1 has 5 frames, and 2 rows in"),
        (lambda table: table.slice(2), "row 0: frame_index=2 where frame 0 of episode 1 is expected"),
        (lambda table: pyarrow.concat_tables([table, table]), "row 5: frame_index=0 of episode 1 is in"),
        (lambda table: table.drop(["observation.state"]), "no column observation.state, a feature in meta/info.json"),
        (lambda table: table.append_column("action", table["action"]), "no readable parquet file (Multiple matches"),
        (lambda table: table.slice(0, 0), "holds no frames"),
    ],
)
def test_a_changed_file_is_named(folder, edit, says):
    rewrite(folder, edit)
    assert says in refused(folder)
    assert "episode_000001.parquet" in refused(folder) or "episode 1" in refused(folder)


def test_the_totals_are_compared_where_no_list_is(folder):
    (folder / "meta/episodes.jsonl").unlink()
    rewrite(folder, lambda table: table.slice(0, 2))
    assert "info.json: total_frames=20, but 17 are in" in refused(folder)


@pytest.mark.parametrize("content", [b"", b"PAR1 no more", None])
def test_a_broken_parquet_file_is_named(folder, content):
    file = file_of(folder)
    file.write_bytes(file.read_bytes()[:-40] if content is None else content)
    assert f"{file}: no readable parquet file" in refused(folder)


def test_tasks_go_by_their_numbers(folder):
    (folder / "meta/tasks.jsonl").write_text(
        '{"task_index": 7, "task": "seven"}\n\n{"task_index": 0, "task": "zero"}\n'
    )
    put(folder, "task_index", [7] * 5)
    assert [set(episode.observations["task"]) for episode in read_dataset(folder)[:2]] == [{"zero"}, {"seven"}]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tasks.jsonl", None, "tasks.jsonl: missing, and so is tasks.parquet"),
        ("tasks.jsonl", "", "task_index=0 is none of the 0 tasks"),
        ("tasks.jsonl", "{a\n", "tasks.jsonl: line 1: cannot be read as JSON"),
        ("tasks.jsonl", '{"task_index": 0, "task": "a"}\n[1]', "tasks.jsonl: line 2: '[1]' is no object"),
        ("tasks.jsonl", '{"task_index": "0", "task": "a"}', "tasks.jsonl: line 1: {'task_index': '0', "),
        ("tasks.jsonl", '{"task_index": 0, "task": "a"}\n{"task_index": 0, "task": "b"}', "is 'b' here and 'a' before"),
        ("episodes.jsonl", '{"episode_index": 0}', "episodes.jsonl: line 1: episode_index=0, length=None are no whole"),
        ("episodes.jsonl", '{"episode_index": 0, "length": 5}\n' * 2, "line 2: episode_index=0 stands there twice"),
        ("episodes.jsonl", '{"episode_index": 0, "length": 5}', "episode 1 has 0 frames, and 5 rows in"),
        ("info.json", "{x", "info.json: cannot be read as JSON"),
        ("info.json", "[]", "info.json: '[]' is no object of JSON"),
        ("info.json", "\xff", "info.json: cannot be read as JSON"),
    ],
)  # fmt: skip
def test_a_broken_file_of_meta_is_named(folder, name, text, says):
    file = folder / "meta" / name
    file.unlink() if text is None else file.write_text(text, encoding="latin-1")
    assert says in refused(folder)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda info: info.pop("codebase_version"), "codebase_version=None, but only"),
        (lambda info: info.pop("features"), "features=None describes no columns"),
        (lambda info: info["features"].pop("action"), "features has no action"),
        (lambda info: info["features"].pop("episode_index"), "features has no episode_index"),
        (lambda info: info["features"].update(action=3), "features.action=3 is no object with dtype and shape"),
        (lambda info: info["features"]["action"].pop("dtype"), "features.action.dtype=None is no type of numbers"),
        (lambda info: info["features"]["action"].update(dtype="x"), "features.action.dtype='x' is no type of numbers"),
        (lambda info: info["features"]["action"].update(dtype="int64"), "no int64, the dtype in meta/info.json"),
        (lambda info: info["features"]["action"].update(shape=[5]), "not 5 numbers, as meta/info.json says"),
        (lambda info: info["features"]["action"].update(shape="2"), "features.action.shape='2' is no list of sizes"),
        (
            lambda info: info["features"].update({"observation.more": {"dtype": "float32", "shape": [1]}}),
            "no column observation.more, a feature",
        ),
        (lambda info: info.update(total_frames="20"), "total_frames='20', but 20 are in"),
    ],
)
def test_a_wrong_description_is_named(folder, edit, says):
    change(folder, edit)
    assert says in refused(folder)


def test_integers_of_every_type_are_read_as_written(tmp_path):
    episode = demonstration(4, whole=True)
    counts = {kind: np.arange(12).reshape(4, 3).astype(kind) for kind in ("uint8", "int8", "int32", "uint16", "bool")}
    written = Demonstration({**counts, "task": episode.observations["task"]}, episode.actions, episode.rewards)
    write_dataset(tmp_path, [written], fps=10, robot="arm")
    (read,) = read_dataset(tmp_path)
    assert all(np.array_equal(read.observations[kind], part) for kind, part in counts.items())
    assert all(read.observations[kind].dtype == kind for kind in counts)


def test_version_3_lists_its_episodes_in_parquet_files(folder):
    (folder / "meta/episodes.jsonl").unlink()
    (folder / "meta/episodes/chunk-000").mkdir(parents=True)
    listed = pyarrow.table({"episode_index": [0, 1, 2, 3], "length": [5, 5, 6, 5]})
    pyarrow.parquet.write_table(listed, folder / "meta/episodes/chunk-000/file-000.parquet")
    assert f"{folder}/meta/episodes: episode 2 has 6 frames, and 5 rows in" in refused(folder)


def nodes(tree, above=()):
    for name, value in tree.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from nodes(value, (*above, name))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_info_is_read_or_refused(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "any_info"
    if not folder.exists():
        write_dataset(folder, [demonstration()], fps=10, robot="arm")
        (folder / "kept.json").write_text((folder / "meta/info.json").read_text())
    info = json.loads((folder / "kept.json").read_text())
    *above, last = data.draw(st.sampled_from(list(nodes(info))))
    inner = info
    for name in above:
        inner = inner[name]
    odd = [None, 3, -1, "x", "", "float32", "video", "image", True, [], [1], [None], {}, {"a": 1}, [10**30], [1.5]]
    inner[last] = data.draw(st.sampled_from(odd))
    (folder / "meta/info.json").write_text(json.dumps(info))
    with contextlib.suppress(ValueError):
        read_dataset(folder)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255), st.booleans())
def test_any_bytes_of_a_picture_are_read_or_refused(at, byte, cut):
    file = BytesIO()
    PILLOW.effect_noise((8, 8), 40).save(file, "PNG")
    data = bytearray(file.getvalue())
    data[at % len(data)] = byte
    with contextlib.suppress(ValueError, OSError, SyntaxError):
        decode_png(bytes(data[: at % len(data)] if cut else data))
