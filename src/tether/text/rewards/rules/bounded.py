"""Limits for the evaluation of an answer, because the value of a short text, a tower of powers, may exceed any
memory."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tether.runtime.package_warnings import quiet_fork

MAX_SECONDS = 2.0
"""Limit of processor time. A comparison of MATH answers takes 10 ms, the first one in a process a second."""
MAX_MEMORY = 1 << 30
"""Limit of memory, in bytes, in addition to the memory of the calling process."""
_LIMIT_SIGNALS = (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT)  # an answer may also overflow the stack


class LimitExceeded(Exception):
    """The function exceeded `MAX_SECONDS` or `MAX_MEMORY`."""


class BoundedProcessKilled(RuntimeError):
    """The process was killed for another reason than its limits."""


def bounded(function: Callable[..., bool | float], *arguments: Any) -> Any:
    """Call a function in a fork of this process and return its result.

    A fork costs 5 to 15 ms in a reward worker, and 200 ms in a process with torch and a gigabyte of memory, so call a
    function directly if it is certain to end soon.

    Args:
        function: function whose result can be converted to JSON; its side effects are lost.
        arguments: arguments of the function.

    Raises:
        LimitExceeded: the function exceeded `MAX_SECONDS` or `MAX_MEMORY`.
        RuntimeError: the function raised an exception.
        BoundedProcessKilled: the process was killed for another reason.
    """
    # A fork, because in this process no signal could interrupt a power of large numbers.
    reading, writing = os.pipe()
    with quiet_fork():
        child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(_limited(function, *arguments)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    status = os.waitpid(child, 0)[1]
    if not answer:
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _LIMIT_SIGNALS:
            raise LimitExceeded
        raise BoundedProcessKilled(f"the process that evaluates an answer ended with status {status}")
    kind, result = json.loads(answer)
    if kind == "limit":
        raise LimitExceeded
    if kind == "raised":
        raise RuntimeError(result)
    return result


def _limited(function: Callable[..., bool | float], *arguments: Any) -> tuple[str, object]:
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the handler of a profiler would not end this process
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, (data + MAX_MEMORY, data + MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        return "result", function(*arguments)
    except (MemoryError, RecursionError):
        return "limit", None
    except Exception as error:  # noqa: BLE001 - a library may raise anything for a policy's answer
        return "raised", f"{type(error).__name__}: {error}"[:500]
