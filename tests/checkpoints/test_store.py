"""The checkpoint store on a real disk: whole or not at all, damage noticed, nothing lost by a kill or a full disk."""

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tether.checkpoints import manifest
from tether.checkpoints.state import load_state, save_state
from tether.checkpoints.store import (
    TRACKER,
    CheckpointDamaged,
    CheckpointStore,
    DiskFull,
    find_checkpoint,
    step_of,
    verify,
)

Spoil = Callable[[Path], None]
ROOT = Path(__file__).resolve().parents[2]


def content(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights.bin").write_bytes(text.encode() * 1000)
        (folder / "state.json").write_text(text)

    return write


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def steps(root: Path) -> list[int]:
    return sorted(step_of(path) for path in root.glob("global_step_*"))


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_save_is_found_and_verifies(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "new" / "root")
    assert store.latest() is None
    saved = store.save(3, content("a"))
    assert saved.name == "global_step_3"
    assert step_of(saved) == 3
    assert (saved / "state.json").read_text() == "a"
    assert store.latest() == saved
    verify(saved)
    assert names(store.root) == {"global_step_3", "latest_checkpointed_iteration.txt"}
    assert (store.root / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_latest_is_the_one_saved_last_not_the_highest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(20, content("a"))
    assert store.save(12, content("b")) == store.latest()


def test_without_a_tracker_the_highest_step_is_found_whatever_the_clock_says(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(20, content("a"))
    store.save(12, content("b"))
    (tmp_path / TRACKER).unlink()
    assert store.latest() == tmp_path / "global_step_20"


@pytest.mark.parametrize("tracker", ["", "99", "\x00garbage"])
@pytest.mark.parametrize("saved", [True, False])
def test_a_tracker_that_names_no_checkpoint_is_refused(tmp_path: Path, tracker: str, saved: bool) -> None:
    store = CheckpointStore(tmp_path)
    if saved:
        store.save(12, content("b"))
    (tmp_path / TRACKER).write_text(tracker)
    remedy = f"resume from {tmp_path}/global_step_12" if saved else "start from scratch"
    with pytest.raises(CheckpointDamaged) as error:
        store.resolve("auto")
    assert str(error.value).startswith(f"{tmp_path / TRACKER}: names {tracker!r}")
    assert remedy in str(error.value)
    assert store.resolve("disable") is None
    (tmp_path / TRACKER).unlink()
    assert store.resolve("auto") == (tmp_path / "global_step_12" if saved else None)


def _remove_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def _make_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


def _make_broken_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("nowhere")


@pytest.mark.parametrize("spoil", [_remove_manifest, shutil.rmtree, _make_file, _make_broken_link])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_checkpoint_that_is_not_whole_is_refused_by_name(tmp_path: Path, spoil: Spoil, step: int) -> None:
    store = CheckpointStore(tmp_path)
    saved = {n: store.save(n, content("abc")) for n in (1, 2, 3)}
    spoil(saved[step])
    if spoil is shutil.rmtree and step < 3:
        assert store.resolve("auto") == saved[3]  # as a user may delete an old one
        return
    good = saved[2 if step == 3 else 3]
    with pytest.raises(CheckpointDamaged) as error:
        store.resolve("auto")
    assert f"{saved[step]}: not whole" in str(error.value) or f"{TRACKER}: names '3'" in str(error.value)
    assert str(good) in str(error.value)
    start = store.resolve("resume_path", good)  # as the message says
    aside = store.set_aside(start)
    assert (aside is None) == (spoil is shutil.rmtree)
    assert store.resolve("auto") == good


def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path: Path) -> None:
    saved = CheckpointStore(tmp_path).save(1, content("abc"))
    for name in (".nfs000001", "actor/.nfs000002"):  # an open file that was deleted
        (saved / name).write_text("")
    verify(saved)
    for extra in (saved / "actor" / "modeling.py", saved / "link"):
        extra.symlink_to("actor") if extra.name == "link" else extra.write_text("")
        with pytest.raises(CheckpointDamaged) as error:
            verify(saved)
        assert str(error.value).startswith(f"{extra}: not part of the checkpoint, its manifest.json does not list it")
        extra.unlink()
    verify(saved)


def test_the_format_of_the_manifest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT", 2)
    saved = CheckpointStore(tmp_path).save(1, content("abc"))
    verify(saved)
    monkeypatch.undo()
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json: has format 2, and this version of tether reads 1"):
        verify(saved)


def test_set_aside_leaves_what_leads_to_the_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "root")
    assert store.set_aside(None) is None
    for step in (10, 20, 30):
        store.save(step, content("a"))
    (tmp_path / "root" / "global_step_30").rename(tmp_path / "moved")
    (tmp_path / "root" / "global_step_30").symlink_to("../moved")
    aside = store.set_aside(store.resolve("resume_path", tmp_path / "root" / "global_step_10"))
    assert aside == tmp_path / "root" / "earlier_1"
    assert names(aside) == {"global_step_20", "global_step_30"}
    assert (aside / "global_step_30" / "state.json").read_text() == "a"
    assert store.resolve("auto") == tmp_path / "root" / "global_step_10"  # the tracker went back, too
    assert store.set_aside(store.resolve("disable")) == tmp_path / "root" / "earlier_2"
    assert store.resolve("auto") is None
    assert CheckpointStore(tmp_path / "root" / "earlier_2").resolve("auto") is not None


def test_a_start_elsewhere_sets_all_aside(tmp_path: Path) -> None:
    start = CheckpointStore(tmp_path / "other").save(20, content("a"))
    store = CheckpointStore(tmp_path / "root")
    for step in (10, 20, 30):
        store.save(step, content("b"))
    aside = store.set_aside(start)
    assert aside is not None
    assert names(aside) == {"global_step_10", "global_step_20", "global_step_30"}
    assert store.resolve("auto") is None


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, content("old"))
    saved = store.save(1, content("new"))
    assert (saved / "state.json").read_text() == "new"
    verify(saved)
    assert names(tmp_path) == {"global_step_1", "latest_checkpointed_iteration.txt"}


def test_keep_counts_by_step_whichever_process_saved(tmp_path: Path) -> None:
    for step in (5, 30, 40):  # by a process that kept all
        CheckpointStore(tmp_path).save(step, content("a"))
    CheckpointStore(tmp_path, keep=3).save(11, content("b"))
    assert steps(tmp_path) == [5, 11, 30, 40]  # later ones are not this run's to delete
    CheckpointStore(tmp_path, keep=2).save(41, content("b"))
    assert steps(tmp_path) == [40, 41]
    CheckpointStore(tmp_path, keep=1).save(42, content("c"))
    assert steps(tmp_path) == [42]
    with pytest.raises(ValueError, match="keep at least 1"):
        CheckpointStore(tmp_path, keep=0)


def test_the_clock_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        monkeypatch.setattr(time, "time_ns", lambda step=step: 10**18 - step)  # a clock that goes backwards
        store.save(step, content("a"))
    assert steps(tmp_path) == [3, 4]


@pytest.mark.parametrize("link", ["../elsewhere", "{absolute}"])
def test_a_link_to_a_checkpoint_is_pruned_as_a_link(tmp_path: Path, link: str) -> None:
    store = CheckpointStore(tmp_path / "root", keep=2)
    for step in (1, 2):
        store.save(step, content("a"))
    elsewhere = (tmp_path / "root" / "global_step_1").rename(tmp_path / "elsewhere")
    (tmp_path / "root" / "global_step_1").symlink_to(link.format(absolute=elsewhere))
    assert store.resolve("auto") == tmp_path / "root" / "global_step_2"
    store.save(3, content("b"))
    assert steps(store.root) == [2, 3]
    assert (elsewhere / "state.json").read_text() == "a"
    (store.root / ".doomed_global_step_1").symlink_to(elsewhere)  # killed while it was pruned
    assert store.resolve("auto") == tmp_path / "root" / "global_step_3"
    assert not names(store.root) & {".doomed_global_step_1"}
    assert (elsewhere / "state.json").read_text() == "a"


@pytest.mark.parametrize("name", ["actor/weights.bin", "state.json"])
def test_one_flipped_byte_is_refused_and_the_good_one_offered(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(step, content("abc"))
    flip_byte(tmp_path / "global_step_3" / name, 2)
    flip_byte(tmp_path / "global_step_2" / name, 0)  # so the offer must go back to step 1
    with pytest.raises(CheckpointDamaged) as error:
        store.resolve("auto")
    assert f"global_step_3/{name}: damaged" in str(error.value)
    assert f"trainer.resume_from_path={tmp_path}/global_step_1" in str(error.value)


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    manifest = store.save(1, content("abc")) / "manifest.json"
    good = manifest.read_bytes()
    for position in range(len(good)):
        if chr(good[position]).isspace():
            continue  # white space between tokens says nothing
        flip_byte(manifest, position)
        with pytest.raises(CheckpointDamaged, match="no other good checkpoint"):
            verify(tmp_path / "global_step_1")
        manifest.write_bytes(good)
    verify(tmp_path / "global_step_1")


def test_missing_and_short_files_and_a_renamed_checkpoint_are_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    saved = store.save(1, content("abc"))
    (saved / "state.json").write_text("ab")
    with pytest.raises(CheckpointDamaged, match=r"state.json: damaged, 2 bytes instead of 3"):
        verify(saved)
    (saved / "state.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"state.json: missing"):
        verify(saved)
    renamed = store.save(2, content("abc")).rename(tmp_path / "global_step_7")
    with pytest.raises(CheckpointDamaged, match=r"global_step_7/manifest\.json"):
        verify(renamed)


def test_resolve(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.resolve("auto") is None
    first, second = store.save(1, content("a")), store.save(2, content("b"))
    assert store.resolve("auto") == second
    assert store.resolve("disable") is None
    assert store.resolve("resume_path", first) == first
    with pytest.raises(ValueError, match=r"set trainer\.resume_from_path"):
        store.resolve("resume_path")
    (tmp_path / "chosen").symlink_to("global_step_1")
    assert store.resolve("resume_path", tmp_path / "chosen") == find_checkpoint(tmp_path / "chosen") == first
    with contextlib.chdir(first):
        assert find_checkpoint(Path()) == first
    for wrong in (tmp_path, tmp_path / "global_step_9", tmp_path / "global_step_1" / "actor"):
        with pytest.raises(ValueError, match="not a checkpoint") as error:
            store.resolve("resume_path", wrong)
        assert str(first) in str(error.value) or wrong.name == "actor"


def test_a_failing_write_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    previous = store.save(1, content("a"))
    before = names(tmp_path)

    def write(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(2, write)
    assert names(tmp_path) == before
    assert store.resolve("auto") == previous


@pytest.mark.parametrize("moment", ["writing", "replacing", "deleting"])
def test_leftovers_of_a_killed_process_are_cleared(tmp_path: Path, moment: str) -> None:
    store = CheckpointStore(tmp_path)
    saved = store.save(1, content("a"))
    expected = names(tmp_path)
    match moment:
        case "writing":
            content("b")(_mkdir(tmp_path / ".writing_global_step_2"))
        case "replacing":
            saved.rename(tmp_path / ".replaced_global_step_1")
        case "deleting":
            _mkdir(tmp_path / ".doomed_global_step_0")
    assert store.resolve("auto") == saved
    assert names(tmp_path) == expected


def _mkdir(path: Path) -> Path:
    path.mkdir()
    return path


def _save_for_ever(root: Path, seed: int) -> None:
    """Save like a run that is killed and resumed: steps go on from the latest, and now and then are repeated."""
    draw = random.Random(seed)
    store = CheckpointStore(root, keep=2)
    start = store.resolve("auto")
    step = 0 if start is None else step_of(start)
    while True:
        step += draw.choice((0, 1, 1))
        data = draw.randbytes(300_000)

        def write(folder: Path, data: bytes = data) -> None:
            for part in range(4):
                (folder / f"part_{part}.bin").write_bytes(data)

        store.save(step, write)


def test_killed_at_any_moment_the_latest_is_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    reached, interrupted, seed = [0], 0, 0
    while seed < 12 or interrupted < 3:  # kills that fell into a save
        seed += 1
        assert seed < 200, "no kill falls into a save"
        child = os.fork()
        if child == 0:
            _save_for_ever(tmp_path, seed)
        time.sleep(random.Random(seed).uniform(0.05, 0.2))
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child ended by itself"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        interrupted += any(name.startswith(".") for name in names(tmp_path))
        latest = store.resolve("auto")  # verifies
        reached.append(step_of(latest) if latest else 0)
        assert reached == sorted(reached), "a kill lost a checkpoint that had been saved"
        assert not [name for name in names(tmp_path) if name.startswith(".")]
    assert reached[-1] > 0


def _torch_file(folder: Path) -> None:
    save_state(folder / "state.pt", {"x": torch.zeros(1 << 20)})


def _safetensors_file(folder: Path) -> None:
    save_file({"x": torch.zeros(1 << 20)}, folder / "x.safetensors")


def _plain_file(folder: Path) -> None:
    (folder / "x.bin").write_bytes(b"0" * (4 << 20))


@pytest.mark.parametrize("write", [_torch_file, _safetensors_file, _plain_file])
def test_disk_full_is_one_clear_error(small_disk: Path, write: Callable[[Path], None]) -> None:
    store = CheckpointStore(small_disk)
    with pytest.raises(DiskFull, match="needs more than") as error:
        store.save(1, write)
    assert "No checkpoint was saved before" in str(error.value)
    previous = store.save(10, lambda folder: (folder / "x").write_bytes(b"1" * (1 << 20)))
    with pytest.raises(DiskFull, match=f"disk full while saving {small_disk}/global_step_20") as error:
        store.save(20, write)
    assert f"{previous} is untouched" in str(error.value)
    assert "it needs" in str(error.value)
    assert store.resolve("auto") == previous
    assert names(small_disk) == {"global_step_10", "latest_checkpointed_iteration.txt"}
    assert store.save(11, content("fits")) == store.latest()


def test_a_disk_without_room_for_a_name_is_the_same_error(small_disk: Path) -> None:
    """A folder, or the tracker after the checkpoint, may be what does not fit."""
    store = CheckpointStore(small_disk / "run")
    used = 1 + sum(1 for _ in small_disk.rglob("*"))
    subprocess.run(["mount", "-o", f"remount,nr_inodes={used + 1}", str(small_disk)], check=True)
    (small_disk / "filler").touch()
    with pytest.raises(DiskFull, match=rf"disk full while saving {small_disk}/run/global_step_1: "):
        store.save(1, content("fits"))
    assert names(small_disk) == {"filler"}


def test_a_small_file_that_does_not_fit_leaves_nothing(small_disk: Path) -> None:
    manifest.write_durably(small_disk / "tracker", "1")
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    with pytest.raises(OSError, match="No space left"):
        manifest.write_durably(small_disk / "tracker", "2")
    assert names(small_disk) == {"filler", "tracker"}
    assert (small_disk / "tracker").read_text() == "1"


def test_a_limit_on_file_size_is_named(tmp_path: Path) -> None:
    def saves() -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        store = CheckpointStore(tmp_path)
        good = store.save(1, lambda folder: (folder / "x").write_bytes(b"1" * 50_000))
        try:
            store.save(2, lambda folder: (folder / "x").write_bytes(b"1" * 200_000))
        except DiskFull as error:
            said = (
                "larger than may be written there: files of this process end at 0.10 MiB. Raise the limit (ulimit -f)"
            )
            return store.resolve("auto") == good and "global_step_2" in str(error) and said in str(error)
        return False

    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os._exit(0 if saves() else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_other_failures_of_writing_are_passed_on(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        raise RuntimeError("no such tensor")

    with pytest.raises(RuntimeError, match="no such tensor"):
        CheckpointStore(tmp_path).save(1, write)


def test_state_loads_back_bit_for_bit(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    python_rng = random.getstate()
    state = {
        "optimizer": optimizer.state_dict(),
        "torch": torch.get_rng_state(),
        "python": python_rng,
        "nan": torch.tensor([float("nan"), -0.0]),
        "cursor": {"epoch": 1, "row": 7},
    }
    save_state(tmp_path / "state.pt", state)
    loaded = load_state(tmp_path / "state.pt")
    assert loaded["python"] == python_rng
    assert loaded["cursor"] == {"epoch": 1, "row": 7}
    assert torch.equal(loaded["torch"], state["torch"])
    assert torch.equal(loaded["nan"].view(torch.int32), state["nan"].view(torch.int32))
    moments = optimizer.state_dict()["state"][0]
    assert all(torch.equal(loaded["optimizer"]["state"][0][key], moments[key]) for key in ("step", "exp_avg"))


class _Harmful:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch harmed",)


def test_a_state_file_cannot_execute_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": _Harmful()}, tmp_path / "state.pt")
    with pytest.raises(
        ValueError,
        match=r"state\.pt: damaged, or of another kind \(UnpicklingError: Trying to load unsupported GLOBAL posix",
    ):
        load_state(tmp_path / "state.pt")
    assert not (tmp_path / "harmed").exists()
