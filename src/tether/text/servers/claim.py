"""Ensures that only one run at a time uses an external server, whose weights it replaces."""

from __future__ import annotations

import fcntl
import os
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tether.runtime.cache import OTHER_CACHE, cache_dir
from tether.runtime.disk import writing
from tether.text.servers.http import Connections

_files: dict[Path, int] = {}
"""Files locked by this process."""
_claims: Counter[Path] = Counter()


class Claim:
    """A lock that keeps other processes away from a server until `close` or the end of this process.

    It only excludes processes on this machine; a run on another machine notices that the server's weights were
    replaced.

    Raises:
        ValueError: another run uses the server.
    """

    def __init__(self, http: Connections) -> None:
        self._is_closed, address = True, http.host
        with suppress(OSError):
            address = socket.gethostbyname(http.host)
        self._path = cache_dir() / "servers" / f"{address}_{http.port}.lock"
        if self._path not in _files:
            _files[self._path] = _locked(self._path, http.url)
        _claims[self._path] += 1
        self._is_closed = False

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        _claims[self._path] -= 1
        if not _claims[self._path]:
            os.close(_files.pop(self._path))

    def __del__(self) -> None:
        self.close()


def _locked(path: Path, url: str) -> int:
    with writing(path, OTHER_CACHE):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(file, 100, 0).decode(errors="replace") or "a process that just starts"
        os.close(file)
        raise ValueError(
            f"{url}: another run samples with this server: {owner}. Wait for its end, or remove the address from "
            "actor_rollout_ref.rollout.server_urls"
        ) from None
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()}".encode(), 0)
    return file
