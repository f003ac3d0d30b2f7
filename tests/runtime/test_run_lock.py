"""One run at a time in a folder: the lock ends with its owner, however that ends, and names it until then."""

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tether.runtime import run_lock
from tether.runtime.run_lock import LOCK, RunFolderBusy, RunLock

ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import os, sys, time
from pathlib import Path
from tether.runtime.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
child = os.fork() if "fork" in sys.argv else None
if child != 0:
    print("locked", child or 0, flush=True)
time.sleep(600)
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that holds the lock of tmp_path."""
    processes = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", OWNER, str(tmp_path), *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.wait()


def said(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout
    return process.stdout.readline().split()


def record(folder: Path, **changed: object) -> None:
    """The file of an owner that is gone, unless `changed` says otherwise."""
    owner = {"host": "gpu-17", "machine": "another", "process": 4242, "started": "1", "since": "yesterday"}
    (folder / LOCK).write_text(json.dumps(owner | changed))


def test_a_second_run_is_refused_and_told_who_is_there(tmp_path: Path, start: Start) -> None:
    owner = start()
    assert said(owner)[0] == "locked"
    with pytest.raises(RunFolderBusy) as error:
        RunLock(tmp_path)
    shown = str(error.value)
    assert shown.startswith(
        f"trainer.default_local_dir={tmp_path}: another run uses this folder: process {owner.pid} on "
    )
    assert f" on {socket.gethostname()}, since 20" in shown
    assert "give this one a folder of its own" in shown


def test_two_runs_of_one_process(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(RunFolderBusy):
        RunLock(tmp_path)
    with RunLock(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == ""


def test_a_folder_is_removed_by_who_has_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    first, opened = RunLock(folder), os.open

    def removed(path: Path, *args: int, **options: int) -> int:
        file = opened(path, *args, **options)
        if path == folder / LOCK and folder.exists():  # the first run ends between the opening and the locking
            first.remove_folder()
        return file

    (folder / "deep").mkdir()
    (folder / "deep" / "file").touch()
    monkeypatch.setattr(os, "open", removed)
    with pytest.raises(RunFolderBusy, match="just starting or ending"):
        RunLock(folder)  # what it has locked is no file of the folder any more
    monkeypatch.undo()
    assert not folder.exists()
    with RunLock(folder) as lock:
        shutil.rmtree(folder)
        lock.remove_folder()


def test_kill_9_lets_the_next_run_in(tmp_path: Path, start: Start) -> None:
    owner = start()
    said(owner)
    owner.kill()
    owner.wait()
    RunLock(tmp_path).close()


def test_a_forked_child_does_not_hold_the_lock_of_a_killed_parent(tmp_path: Path, start: Start) -> None:
    owner = start("fork")
    child = int(said(owner)[1])
    time.sleep(0.2)  # the child closes its copy right after the fork
    owner.kill()
    owner.wait()
    try:
        os.kill(child, 0)  # still there
        RunLock(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_an_owner_on_another_machine_that_touches_its_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system whose locks do not reach other machines."""
    record(tmp_path)
    monkeypatch.setattr(run_lock, "WATCH_SECONDS", 5.0)
    touching = threading.Timer(0.7, lambda: os.utime(tmp_path / LOCK))
    touching.start()
    with pytest.raises(RunFolderBusy, match="process 4242 on gpu-17, since yesterday"):
        RunLock(tmp_path)
    touching.join()


def test_an_owner_on_another_machine_that_touches_nothing_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path)
    monkeypatch.setattr(run_lock, "WATCH_SECONDS", 0.3)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert "last used by process 4242 on gpu-17" in capfd.readouterr().err


def test_the_owner_touches_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "TOUCH_SECONDS", 0.02)
    with RunLock(tmp_path):
        before = (tmp_path / LOCK).stat().st_mtime_ns
        end = time.monotonic() + 10
        while (tmp_path / LOCK).stat().st_mtime_ns == before:
            assert time.monotonic() < end


def test_a_folder_that_is_deleted_under_its_owner_is_locked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "TOUCH_SECONDS", 0.02)
    folder = tmp_path / "run"
    with RunLock(folder):
        owner = (folder / LOCK).read_text()
        shutil.rmtree(folder)
        end = time.monotonic() + 10
        while not (folder / LOCK).exists() or (folder / LOCK).read_text() != owner:
            assert time.monotonic() < end
        time.sleep(0.1)
        with pytest.raises(RunFolderBusy, match=f"process {os.getpid()}"):
            RunLock(folder)
    RunLock(folder).close()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    owner = start()
    said(owner)

    def no_locks(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(RunFolderBusy, match=f"process {owner.pid} on"):
        RunLock(tmp_path)
    owner.kill()
    owner.wait()
    RunLock(tmp_path).close()


def test_a_file_that_says_nothing_stops_nobody(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"process": 1}', "\0" * 100):
        (tmp_path / LOCK).write_text(text)
        RunLock(tmp_path).close()


@pytest.mark.parametrize("place", ["run", "run/deeper"])
def test_a_folder_that_is_a_file(tmp_path: Path, place: str) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match=f"^trainer.default_local_dir={tmp_path}/{place}: {tmp_path}/run is a file"):
        RunLock(tmp_path / place)


def test_a_read_only_disk(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ValueError, match=r"^--out=.*/run: cannot be written to \(Read-only file system\)"):
        RunLock(small_disk / "run", key="--out")


def test_a_full_disk(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(b"0" * shutil.disk_usage(small_disk).free)
    with pytest.raises(ValueError, match=r"cannot be written to \(No space left on device\)"):
        RunLock(small_disk / "run")
    filler.unlink()
    RunLock(small_disk / "run").close()
