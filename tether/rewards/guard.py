"""The guard: a small process beside each reward worker that can always end it, whatever the worker does.

The guard never runs user code and never waits for the worker. It ends the worker when a call passes its deadline,
when the trainer closes the control socket (or is gone, even by kill -9), and cleans up when the worker exits by itself.
The deadline is measured here, from the moment the call began, so a busy trainer never causes a false timeout.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Clock(Protocol):
    """One float in memory shared with the worker: when the running call began (monotonic seconds), 0 between calls."""

    def __getitem__(self, index: int) -> float: ...
    def __setitem__(self, index: int, value: float) -> None: ...


@dataclass(frozen=True)
class Verdict:
    """Why a worker is no more."""

    reason: str
    seconds: float = 0.0
    """How long the running call had taken."""

    def dump(self) -> bytes:
        """As bytes for the control socket."""
        return json.dumps([self.reason, self.seconds]).encode()

    @staticmethod
    def load(data: bytes) -> Verdict:
        """Read `dump`; nothing to read means that the guard itself did not live to say it."""
        return (
            Verdict(*json.loads(data))
            if data
            else Verdict("the reward worker and its guard were killed or could not start")
        )


def adopt_orphans() -> None:
    """Make grandchildren whose parent exits children of this process, so that none escapes (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent is gone (Linux); elsewhere only the guard does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def wake_on_child_exit() -> int:
    """A file descriptor that becomes readable whenever a child exits. Call it before the child is made."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler the wake-up is not written
    return read_end


def guard(worker: int, control: socket.socket, child_exit: int, clock: Clock, timeout: float) -> None:
    """Wait until `worker` has to end or has ended, leave no process of it behind, and tell the trainer why.

    Args:
        worker: process id; leader of its own process group.
        control: its other end is in the trainer, which closes it to end the worker.
        child_exit: from `wake_on_child_exit`.
        clock: when the running call began.
        timeout: seconds a call may take.
    """
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    verdict = _watch(worker, control, child_exit, clock, timeout)
    _kill_all(worker)
    with contextlib.suppress(OSError):  # the trainer is gone: nobody to tell
        control.sendall(verdict.dump())


def _watch(worker: int, control: socket.socket, child_exit: int, clock: Clock, timeout: float) -> Verdict:
    while True:
        begun, now = clock[0], time.monotonic()
        # Between calls, sleep as long as a call may take: one that begins meanwhile cannot be late before that.
        left = begun + timeout - now if begun else timeout
        if left <= 0:
            return Verdict(f"no result within the deadline of {timeout:g} s, so the call was killed", now - begun)
        ready, _, _ = select.select([control.fileno(), child_exit], [], [], left)
        if control.fileno() in ready:
            return Verdict("the reward pool was closed")
        if child_exit in ready:
            os.read(child_exit, 4096)
            status = _reap().get(worker)
            if status is not None:
                return Verdict(_death(status), time.monotonic() - begun if begun else 0.0)


def _death(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"the reward function ended its process with exit code {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"the process of the reward function was killed by {signal.Signals(-code).name}{hint}"


def _reap() -> dict[int, int]:
    """Collect the children that have exited: process id -> wait status."""
    exited: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exited
        if pid == 0:
            return exited
        exited[pid] = status


def _kill_all(worker: int) -> None:
    """Kill the worker's process group, then every descendant that left the group, until none is left."""
    _kill(os.killpg, worker)
    while remaining := _descendants():
        for pid in remaining:
            _kill(os.kill, pid)
        _reap()
        time.sleep(0.001)


def _kill(send: Callable[[int, int], None], target: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone (macOS: "not permitted" of a zombie)
        send(target, signal.SIGKILL)


def _descendants() -> list[int]:
    """Processes below this one, from /proc; without /proc (macOS) only the process group is known."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # the name before ")" may hold spaces
        except OSError:
            continue  # exited meanwhile
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
