"""The guard: a small process between an owner and a worker, which can always end the worker, whatever that does.

::

    owner ────────── messages ─────────────────────────► worker (own session): runs a user's code
          ◄──────────────────────────────────────────────
          ────────── control ───► guard ─── SIGKILL ───► worker and everything that it started
          ◄───────── verdict ────

The guard never runs user code and never waits for the worker. It ends the worker when the owner closes the control
socket or is gone, even by kill -9, and cleans up when the worker exits by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
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
_LOOKS = 5.0  # seconds between two looks whether the owner is alive, where the kernel does not say so


def supervise(work: Callable[[], None], control: socket.socket, owner: int) -> NoReturn:
    """Be the guard of a worker that does `work`; returns in no process.

    Args:
        work: what the worker does, in a process forked from this one.
        control: its other end is in the owner, which shuts it down to end the worker and reads the verdict from it.
        owner: process id of the parent of this process.
    """
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()  # Ctrl-C is for the owner
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCHLD)  # the wake-up below; a thread of the owner that ended gives one, too
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
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone (macOS: "not permitted" of a zombie)
        os.killpg(worker, signal.SIGKILL)
    end_descendants(guard)
    with contextlib.suppress(OSError):  # the owner is gone: nobody to tell
        control.sendall(verdict.encode())
    os._exit(0)


def end_descendants(process: int, spared: Collection[int] = ()) -> None:
    """Kill every process below `process`, until none is left but those that are `spared`; reap those of this process.

    Orphans are below the process that adopts them (`adopt_orphans`). Needs /proc.
    """
    while below := {pid: exited for pid, exited in descendants(process).items() if pid not in spared}:
        reaped = False
        for pid, exited in below.items():
            if not exited:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # the child of another process
                reaped |= os.waitpid(pid, os.WNOHANG)[0] == pid
        if all(below.values()) and not reaped:
            return  # left are those that another process has to reap
        time.sleep(0.001)


def descendants(process: int) -> dict[int, bool]:
    """Processes below `process`, and whether each has exited already; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    exited: dict[int, bool] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()  # the name before ")" may hold spaces
        except (OSError, ValueError):
            continue  # gone meanwhile
        pid = int(stat.parent.name)
        exited[pid] = state in "ZX"
        children.setdefault(int(parent), []).append(pid)
    found: dict[int, bool] = {}
    waiting = [process]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update({pid: exited[pid] for pid in below})
        waiting += below
    return found


def adopt_orphans() -> None:
    """Make processes below this one its own children when their parents exit, so that none escapes (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def has_children() -> bool:
    """Whether this process has a child, running or not (Linux; False elsewhere). One system call."""
    if sys.platform != "linux":
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def exit_after(work: Callable[[], None]) -> NoReturn:
    """Do `work` in a process that was just forked, and end it as Python would: 0, the code of SystemExit, or 1."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - this is where Python itself would show it
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
        os._exit(1)  # the guard was gone before the kernel knew whom to watch
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A scheduler may send these to every process of a run. They are for the owner, which finishes its step with this
    # worker; a handler that does nothing, unlike SIG_IGN, is not inherited by programs that the worker starts.
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
    """Let a process that the worker forks be ended as usual, by `multiprocessing.Pool` for example."""
    for number in _OWNERS:
        signal.signal(number, signal.SIG_DFL)
    _release_signals()  # one that came since the fork acts now


def _watch(worker: int, control: socket.socket, child_exit: int, owner: int) -> str:
    """Wait until the worker has to end or has ended; returns why."""
    while True:
        ready, _, _ = select.select([control.fileno(), child_exit], [], [], _LOOKS)
        if control.fileno() in ready or os.getppid() != owner:
            return "its owner ended it"
        if child_exit in ready:
            os.read(child_exit, 4096)
            status = _reap().get(worker)
            if status is not None:
                return _death(status)


def _death(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


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


def _wake_on_child_exit() -> int:
    """A file descriptor that becomes readable whenever a child exits. Call it before the child is made."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler the wake-up is not written
    return read_end


def _keep_open(*kept: int) -> None:
    """Close what was inherited, such as the owner's ends of other guards' sockets: their guards wait for the end."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    bounds = [2, *sorted((*kept, wakeup)), os.sysconf("SC_OPEN_MAX")]
    for low, high in pairwise(bounds):
        os.closerange(low + 1, high)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
