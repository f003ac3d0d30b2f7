"""Programs that are forks of a process which has imported what they need.

An interpreter of its own takes four seconds of processor time to import torch and transformers. A fork takes none. The
process that is started in its place is a small one: either ends with the other, and the fork stops with it. What is
forked is an interpreter of one thread: a fork of the tests' process could inherit a lock that another thread holds.
"""

import ctypes
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import psutil

ROOT = Path(__file__).resolve().parents[3]
MODULES = ("tests.text.servers.vllm_stand_in", "tests.text.servers.sglang_stand_in")
# What starts this sees it write to its output and end with the exit code or the signal of the fork, and can kill it.
PROGRAM = """
import json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + sys.argv[1])
connection.sendall(json.dumps([os.getpid(), sys.argv[2:], dict(os.environ)]).encode() + b"\\n")
code = int(connection.makefile().read() or 1)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@functools.cache
def address() -> str:
    """Return the address, for `PROGRAM`, of a process that forks programs; it ends with this one."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # the kernel chooses a name; who comes before the process is ready waits
    listener.listen()
    words = [sys.executable, "-m", "tests.text.servers.forked", str(listener.fileno())]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    _started.append(subprocess.Popen(words, cwd=ROOT, env=environment, pass_fds=[listener.fileno()]))
    name = listener.getsockname()[1:].decode()
    listener.close()
    return name


_started: list["subprocess.Popen[bytes]"] = []


def fork_behind(pid: int) -> psutil.Process:
    """Return the fork that a process of `PROGRAM` stands for; to stop that process stops it a moment later."""
    (fork,) = [child for child in psutil.Process(_started[0].pid).children() if child.name() == _name(pid)]
    return fork


def _name(pid: int) -> str:
    return f"behind {pid}"


def main() -> None:
    """Fork a program for each process that connects, until the tests' process is gone."""
    _die_with_parent()
    gc.disable()
    for module in MODULES:
        import_module(module)
    gc.freeze()  # collecting what they made would copy all of it in each fork
    gc.enable()
    listener = socket.socket(fileno=int(sys.argv[1]))
    forks: dict[int, tuple[socket.socket, int]] = {}
    while True:
        if select.select([listener], [], [], 0.02)[0]:
            connection, _ = listener.accept()
            pid, arguments, variables = json.loads(connection.makefile().readline())
            child = os.fork()
            if not child:
                _become(pid, arguments, variables)
            forks[child] = connection, pid
        for child in list(forks):
            if _has_ended(child, *forks[child]):
                forks.pop(child)[0].close()


def _has_ended(child: int, connection: socket.socket, pid: int) -> bool:
    """Let happen to a fork what happens to the process that stands for it, and report its end there."""
    if select.select([connection], [], [], 0)[0]:
        os.kill(child, signal.SIGKILL)
    elif _is_stopped(pid):
        os.kill(child, signal.SIGSTOP)
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        with suppress(OSError):  # the other end may be gone
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            connection.shutdown(socket.SHUT_RDWR)
    return bool(ended)


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _become(pid: int, arguments: list[str], variables: dict[str, str]) -> NoReturn:
    """Run a module's `main` with no open file or connection of the process that forked it."""
    _die_with_parent()
    ctypes.CDLL(None).prctl(15, _name(pid).encode())  # PR_SET_NAME
    os.setsid()
    output, null = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor != output:
            os.dup2(null, descriptor)  # as closing it would give its number to another, which its owner then closes
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", closefd=False) for descriptor in (1, 2))
    os.environ.clear()
    os.environ.update(variables)
    sys.argv, code = arguments, 1
    try:
        import_module(arguments[0]).main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
