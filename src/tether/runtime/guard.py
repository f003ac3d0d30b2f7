"""The guard: a small process between an owner and a worker, which can always kill the worker.

::

    owner ────────── messages ─────────────────────────► worker (own session): runs a user's code
          ◄──────────────────────────────────────────────
          ────────── control ───► guard ─── SIGKILL ───► worker and everything that it started
          ◄───────── verdict ────

The guard never runs user code and never waits for the worker. It kills the worker when the owner closes the control
socket or dies, even by kill -9, and cleans up when the worker exits by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_OWNERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_SECONDS = 5.0  # interval of checks whether the owner is alive, where the kernel does not report its death


def supervise(work: Callable[[], None], control: socket.socket, owner: int, folder: str = "") -> NoReturn:
    """Run as the guard of a worker that executes `work`; never returns.

    Args:
        work: executed by the worker, in a process forked from this one.
        control: socket to the owner, which shuts it down to kill the worker and reads how the worker ended.
        owner: process id of this process's parent.
        folder: the worker's folder, which is removed once the worker and its descendants have ended; "" for none.
    """
    with contextlib.suppress(PermissionError):  # it already is a session leader
        os.setsid()  # Ctrl-C is handled by the owner
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCHLD)  # woken by a child's exit, or by the end of the owner's thread
    adopt_orphans()
    child_exit = _wake_on_child_exit()
    guard = os.getpid()
    worker = os.fork()
    if not worker:
        _run_worker(work, control, guard)
    _keep_open(control.fileno(), child_exit)
    for ignored in _OWNERS:
        signal.signal(ignored, signal.SIG_IGN)
    verdict = _watch(worker, control, child_exit, owner)
    with contextlib.suppress(
        ProcessLookupError, PermissionError
    ):  # exited already (macOS reports "not permitted" for a zombie)
        os.killpg(worker, signal.SIGKILL)
    end_descendants(guard)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # the owner has died, so nothing can be reported
        control.sendall(verdict.encode())
    os._exit(0)


def end_descendants(process: int, excluded: Collection[int] = ()) -> None:
    """Kill all descendants of `process` except the `excluded` ones, and reap this process's children.

    Orphans count as descendants of the process that adopted them (`adopt_orphans`). Requires /proc.
    """
    while below := {pid: exited for pid, exited in descendants(process).items() if pid not in excluded}:
        reaped = False
        for pid, exited in below.items():
            if not exited:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # the child of another process
                reaped |= os.waitpid(pid, os.WNOHANG)[0] == pid
        if all(below.values()) and not reaped:
            return  # the remaining ones must be reaped by another process
        time.sleep(0.001)


def descendants(process: int) -> dict[int, bool]:
    """Return the descendants of a process, and whether each has exited; empty without /proc."""
    children: dict[int, list[int]] = {}
    exited: dict[int, bool] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()  # the name before ")" may contain spaces
        except (OSError, ValueError):
            continue  # it has exited meanwhile
        pid = int(stat.parent.name)
        exited[pid] = state in "ZX"
        children.setdefault(int(parent), []).append(pid)
    result: dict[int, bool] = {}
    waiting = [process]
    while waiting:
        below = children.get(waiting.pop(), [])
        result.update({pid: exited[pid] for pid in below})
        waiting += below
    return result


def adopt_orphans() -> None:
    """Make this process adopt its descendants when their parents exit, so that none escapes (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def has_children() -> bool:
    """Whether this process has a child, running or exited (Linux; False elsewhere). Costs one system call."""
    if sys.platform != "linux":
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def exit_after(work: Callable[[], None]) -> NoReturn:
    """Execute `work` in a newly forked process, and exit as Python would: with 0, the code of SystemExit, or 1."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - Python itself would print it here
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _run_worker(work: Callable[[], None], control: socket.socket, guard: int) -> NoReturn:
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)  # the guard died before the kernel was told to watch it
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A scheduler may send these signals to all processes of a run, but only the owner handles them, by finishing its
    # step with this worker. Unlike SIG_IGN, an empty handler is not inherited by programs that the worker starts.
    for number in _OWNERS:
        signal.signal(number, lambda *_: None)
    os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_restore_signals)
    control.close()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    exit_after(work)


def _hold_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _OWNERS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OWNERS)


def _restore_signals() -> None:
    """Restore the default signals in a process that the worker forks, for example by `multiprocessing.Pool`."""
    for number in _OWNERS:
        signal.signal(number, signal.SIG_DFL)
    _release_signals()  # a signal that came since the fork takes effect now


def _watch(worker: int, control: socket.socket, child_exit: int, owner: int) -> str:
    """Wait until the worker has ended or must be killed, and return why."""
    while True:
        ready, _, _ = select.select([control.fileno(), child_exit], [], [], POLL_SECONDS)
        if control.fileno() in ready or os.getppid() != owner:
            return "its owner ended it"
        if child_exit in ready:
            os.read(child_exit, 4096)
            status = _reap().get(worker)
            if status is not None:
                return _describe_exit(status)


def _describe_exit(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _reap() -> dict[int, int]:
    """Reap the children that have exited: process id -> wait status."""
    exited: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exited
        if pid == 0:
            return exited
        exited[pid] = status


def _wake_on_child_exit() -> int:
    """Return a file descriptor that becomes readable when a child exits. Must be called before the fork."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to the wake-up descriptor
    return read_end


def _keep_open(*descriptors: int) -> None:
    """Close all other inherited descriptors. Otherwise this process would keep the sockets of other guards open."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    bounds = [2, *sorted((*descriptors, wakeup)), os.sysconf("SC_OPEN_MAX")]
    for low, high in pairwise(bounds):
        os.closerange(low + 1, high)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
