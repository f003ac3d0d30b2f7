"""Programs that are forks of this process, which has imported what they need.

An interpreter of its own takes four seconds of processor time to import torch and transformers. A fork takes none. The
process that is started in its place is a small one: either ends with the other, and the fork stops with it.
"""

import ctypes
import functools
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

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
    """Return the address, for `PROGRAM`, of a thread of this process that forks programs as they are asked for."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # the kernel chooses a name
    listener.listen()
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    return listener.getsockname()[1:].decode()


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_run, args=(connection,), daemon=True).start()


def _run(connection: socket.socket) -> None:
    """Fork a program, let happen to it what happens to the process that stands for it, and report its end."""
    pid, arguments, variables = json.loads(connection.makefile().readline())
    child = os.fork()
    if not child:
        _become(pid, arguments, variables)
    ended = 0
    while not ended:
        if select.select([connection], [], [], 0.05)[0]:
            os.kill(child, signal.SIGKILL)
        elif _is_stopped(pid):
            os.kill(child, signal.SIGSTOP)
        ended, status = os.waitpid(child, os.WNOHANG)
    with connection, suppress(OSError):  # the other end may be gone
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        connection.shutdown(socket.SHUT_RDWR)


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _become(pid: int, arguments: list[str], variables: dict[str, str]) -> NoReturn:
    """Run a module's `main` with nothing of the tests but their modules: no open file or connection of theirs."""
    gc.freeze()  # collecting what the tests have made would copy all of it
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
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
