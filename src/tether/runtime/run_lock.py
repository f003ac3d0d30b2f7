"""A lock that allows one run at a time in a folder.

The lock is the kernel's (`flock`), so it is released when its process ends in any way; the lock file, with the name of
the last owner, remains. The file also covers file systems without locks, and network file systems whose locks do not
reach other machines: its owner touches it every few seconds, and another run takes over the folder if it has not been
touched for long enough.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tether.runtime.disk import read_json

LOCK = "run.lock"
TOUCH_SECONDS = 5.0
WATCH_SECONDS = 20.0
"""Seconds without a touch after which an owner on another machine counts as dead."""
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class RunFolderBusy(ValueError):
    """Another run uses the folder; the message names that run."""


class RunLock:
    """Creates the folder of a run, and keeps other runs out until `close` or the end of the process.

    Raises:
        RunFolderBusy: another run uses the folder.
        ValueError: the path is not a writable folder.
    """

    def __init__(self, folder: Path, key: str = "trainer.default_local_dir") -> None:
        self._path = folder / LOCK
        self._named = f"{key}={folder}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._refuse_another()
            # Its owner has just deleted the file, and another run may have created a new one.
            if not self._is_in_place():
                raise self._busy(None)
            record = json.dumps(_this_process() | {"since": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")})
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, record.encode(), 0)
        except OSError as error:
            os.close(self._file)
            raise self._unusable(error) from error
        except BaseException:
            os.close(self._file)
            raise
        self._closed = threading.Event()
        self._touching = threading.Thread(target=self._touch, name="run lock", daemon=True)
        self._touching.start()
        _held.add(self)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._touching.join()
        with suppress(OSError):  # a full disk or a deleted folder: the lock is released anyway
            os.ftruncate(self._file, 0)
        self._release()

    def remove_folder(self) -> None:
        """Delete the run's folder, the lock file last, so that no other run can start there; release the lock."""
        self._closed.set()
        self._touching.join()
        folder = self._path.parent
        with suppress(OSError):  # already deleted, or another run has just begun in it
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif path != self._path:
                    path.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
            folder.rmdir()
        self._release()

    def _release(self) -> None:
        self._closed.set()
        _held.discard(self)
        os.close(self._file)

    def _refuse_another(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                    raise self._busy(self._owner()) from error
                raise
            locked = False
        owner = self._owner()
        if owner is None or (locked and owner["machine"] == _machine()):
            return  # no owner, or a process of this machine that has ended, since it does not hold the kernel's lock
        if owner["machine"] == _machine():
            if owner["started"] is not None and _started(owner["process"]) == owner["started"]:
                raise self._busy(owner)
            return
        print(f"{self._named}: last used by {_described(owner)}; is it still there?", file=sys.stderr)
        if self._is_owner_alive():
            raise self._busy(owner)

    def _is_owner_alive(self) -> bool:
        """Whether the owner touches its file within the maximum interval; does not rely on another machine's clock."""
        before, end = self._modified_ns(), time.monotonic() + WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(min(1.0, WATCH_SECONDS / 10))
            if self._modified_ns() != before:
                return True
        return False

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), self._path.stat())
        except FileNotFoundError:
            return False

    def _modified_ns(self) -> int:
        with self._path.open("rb") as file:  # reopened each time, so that NFS asks the server
            return os.fstat(file.fileno()).st_mtime_ns

    def _owner(self) -> dict[str, Any] | None:
        try:
            owner = json.loads(os.pread(self._file, 4096, 0))
            return owner if {"host", "machine", "process", "started", "since"} <= owner.keys() else None
        except (
            ValueError,
            AttributeError,
            RecursionError,
        ):  # empty: the owner ended normally, or has not written its name yet
            return None

    def _touch(self) -> None:
        while not self._closed.wait(TOUCH_SECONDS):
            with suppress(OSError):  # retried at the next touch
                if not self._path.exists():
                    self._lock_again()
                os.utime(self._file)

    def _lock_again(self) -> None:
        """Lock the file again if the folder was deleted during the run, which continues to write there."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        again = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(again, os.pread(self._file, 4096, 0), 0)
            os.dup2(again, self._file, inheritable=False)
        finally:
            os.close(again)

    def _busy(self, owner: dict[str, object] | None) -> RunFolderBusy:
        who = "a process that is just starting or ending" if owner is None else _described(owner)
        return RunFolderBusy(
            f"{self._named}: another run uses this folder: {who}. Stop that one first (SIGTERM lets it save a "
            "checkpoint), or give this one a folder of its own"
        )

    def _unusable(self, error: OSError) -> ValueError:
        file = next((p for p in (self._path.parent, *self._path.parent.parents) if os.path.isfile(p)), None)
        why = f"{file} is a file" if file else f"cannot be written to ({error.strerror})"
        return ValueError(f"{self._named}: {why}. Name a folder that can be written to")


def owner_of(folder: Path) -> str | None:
    """Return a description of the process that uses a folder; None without one, or if it stopped touching its file."""
    path = folder / LOCK
    with suppress(OSError, ValueError, KeyError):
        if time.time() - path.stat().st_mtime < WATCH_SECONDS:
            return _described(read_json(path, dict, ""))
    return None


def _described(owner: dict[str, object]) -> str:
    return f"process {owner['process']} on {owner['host']}, since {owner['since']}"


def _this_process() -> dict[str, object]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": _machine(), "process": pid, "started": _started(pid)}


def _machine() -> str:
    """Return an id of this machine and its boot, because host names may not be unique."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else str(uuid.getnode())


def _started(pid: int) -> str | None:
    """Return the start time of a process, which distinguishes it from a later one with the same id; None if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


_held: set[RunLock] = set()
"""The locks held by this process."""


def _release_in_child() -> None:
    """Close the lock files in a forked child, which would otherwise hold the locks after its parent has ended."""
    for lock in list(_held):
        lock._release()


os.register_at_fork(after_in_child=_release_in_child)
