"""Small files of a run that hold something else: one sentence that names the file, never a traceback."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tether.checkpoints.manifest import MANIFEST, _checksum, find_damage
from tether.checkpoints.rollbacks import rollbacks_of
from tether.checkpoints.store import TRACKER, CheckpointStore
from tether.commands.status import show_status
from tether.integrations.robots import lerobot_meta
from tether.loop.checkpoint import check_identity
from tether.metrics.loggers import read_metrics
from tether.metrics.loggers.jsonl import METRICS_FILE
from tether.runtime.disk import read_json, reading
from tether.runtime.ranks import SERVERS_STATUS, STATUS
from tether.runtime.run_lock import LOCK, owner_of
from tether.text.learning.rollout_files import read_rollouts
from tether.text.rewards.rules.search import answers_of
from tether.text.servers.http import _parsed

DEEP = "[" * 100_000
NO_OBJECTS = ["", "{", "null", "3", '"text"', "[]", DEEP]
RANK = {"rank": 0, "process": 3, "doing": None, "since": 0, "host": 1, "device": 0, "silent": 0}


def refusal(do: Callable[[], object], file: Path) -> str | None:
    """What is wrong with how a file is refused; None: nothing."""
    try:
        do()
    except ValueError as error:
        return None if str(error).startswith(f"{file}:") else f"not named first: {error}"
    except Exception as error:  # noqa: BLE001
        return repr(error)
    return "taken"


def faults(file: Path, contents: list[str], do: Callable[[], object]) -> list[tuple[str, str]]:
    file.parent.mkdir(parents=True, exist_ok=True)
    found = []
    for content in contents:
        file.write_text(content)
        if fault := refusal(do, file):
            found.append((content[:60], fault))
    return found


def test_small_files_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = tmp_path / "global_step_4"
    identity = checkpoint / "identity.json"
    assert faults(identity, NO_OBJECTS, lambda: check_identity(checkpoint, {})) == []

    entries = ["text", 3, [4], {}, {"collapsed": 5}, {"collapsed": "x", "to": 4}, {"collapsed": 5, "to": None}]
    wrong = ["", "{", "null", "3", '"text"', "{}", DEEP, *(json.dumps([entry]) for entry in entries)]
    assert faults(tmp_path / "rollbacks.json", wrong, lambda: rollbacks_of(tmp_path, checkpoint)) == []

    (tmp_path / METRICS_FILE).write_text("")
    states = [{}, {"ranks": 3}, {"ranks": [3]}, {"ranks": [{}]}, {"time": "x", "ranks": [], "failure": None}]
    states += [{"time": 1, "ranks": [], "failure": "died", "failed": "x"}, {"time": 1, "ranks": [{"since": []}]}]
    wrong = [*NO_OBJECTS, *map(json.dumps, states)]
    assert faults(tmp_path / STATUS, wrong, lambda: show_status(tmp_path)) == []
    (tmp_path / STATUS).write_text(json.dumps({"time": 1, "ranks": [RANK], "failure": None}))
    show_status(tmp_path)  # what rich would not show is shown as text
    states = [{}, {"servers": 3}, {"servers": [3]}, {"servers": [{}]}, {"time": "x", "servers": []}]
    wrong = [*NO_OBJECTS, *map(json.dumps, states)]
    assert faults(tmp_path / SERVERS_STATUS, wrong, lambda: show_status(tmp_path)) == []

    for content in NO_OBJECTS:
        (tmp_path / LOCK).write_text(content)
        assert owner_of(tmp_path) is None


def test_lines_of_another_shape_are_refused_by_number(tmp_path: Path) -> None:
    for content in [line for line in NO_OBJECTS if line]:
        (tmp_path / METRICS_FILE).write_text(content + "\n")
        with pytest.raises(ValueError, match=rf"^{tmp_path}/{METRICS_FILE}:1: not a line of "):
            read_metrics(tmp_path)
        (tmp_path / "1.jsonl").write_text(content + "\n")
        with pytest.raises(ValueError, match=rf"^{tmp_path}/1\.jsonl:1: "):
            read_rollouts(tmp_path)


def test_a_manifest_of_another_shape_is_damage(tmp_path: Path) -> None:
    """Also where its checksum was made for it."""
    folder = CheckpointStore(tmp_path).save(4, lambda folder: (folder / "x").write_bytes(b"1"))
    good = json.loads((folder / MANIFEST).read_text())
    for content in NO_OBJECTS:
        (folder / MANIFEST).write_text(content)
        assert find_damage(folder, 4) == f"{folder / MANIFEST}: damaged, it is not what was saved"
    for files in (None, 3, "x", [], ["x"], {"x": 3}, {"x": None}, {"x": []}, {"x": {}}, {"x": {"size": "1"}}):
        (folder / MANIFEST).write_text(json.dumps(with_checksum(good | {"files": files})))
        found = find_damage(folder, 4)
        assert found is not None
        assert "damaged" in found


def with_checksum(manifest: dict[str, object]) -> dict[str, object]:
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    return body | {"checksum": _checksum(body)}


def test_a_folder_in_the_place_of_the_tracker_is_named(tmp_path: Path) -> None:
    (tmp_path / TRACKER).mkdir()
    for mode in ("auto", "disable"):
        with pytest.raises(ValueError, match=rf"{TRACKER}: is a folder.* Move it away"):
            CheckpointStore(tmp_path).resolve(mode)


def test_what_is_not_of_a_file_is_passed_on(tmp_path: Path) -> None:
    """Bugs, and what tether itself says inside."""
    file = tmp_path / "x.json"
    for error in (MemoryError(), KeyboardInterrupt(), NotImplementedError(), RuntimeError("not enough memory")):
        with pytest.raises(type(error)), reading(file, "Fix it"):
            raise error
    with pytest.raises(ValueError, match=rf"^{file}: cannot be read \(No such file or directory\)\. Fix it$"):
        read_json(file, dict, "Fix it")
    file.write_text("[1]")
    with pytest.raises(ValueError, match=rf"^{file}: is not an object of JSON: \[1\]\. Fix it$"), reading(file, "Not"):
        read_json(file, dict, "Fix it")
    assert read_json(file, list, "") == [1]


def test_texts_that_only_begin_as_json_are_texts_however_deep() -> None:
    assert answers_of(DEEP) == [DEEP]
    assert _parsed(DEEP) == DEEP
    with pytest.raises(ValueError, match=r"^info\.json: cannot be read as JSON"):
        lerobot_meta._parsed(DEEP.encode(), "info.json")
