"""Work on an answer that may take for ever: a tower of powers is a short text, and its value fills any memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_SECONDS = 2.0
"""Of processor time. Comparisons of answers to MATH take a hundredth of a second, and the first ones one."""
MOST_MEMORY = 1 << 30
"""Bytes beside those that the process has."""
_BY_THE_ANSWER = (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT)  # a stack that overflows is its doing, too


class TooMuch(Exception):
    """It took more than it may have."""


class Ended(RuntimeError):
    """Others ended its process."""


def bounded(work: Callable[..., bool | float], *arguments: Any) -> Any:
    """The result of a function, called in a copy of this process, since no signal ends a power of large numbers.

    The copy costs 5 to 15 ms in a reward worker, and 200 where torch and a gigabyte are loaded, so what is known to end
    soon is better called here.

    Args:
        work: what it returns is all that arrives.
        arguments: of it.

    Raises:
        TooMuch: beyond `MOST_SECONDS` or `MOST_MEMORY`.
        RuntimeError: it raised something.
        Ended: its process was ended by others.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # about threads
        child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(_limited(work, *arguments)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    if not said:
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _BY_THE_ANSWER:
            raise TooMuch
        raise Ended(f"the process that looks at an answer ended with status {status}")
    kind, result = json.loads(said)
    if kind == "much":
        raise TooMuch
    if kind == "raised":
        raise RuntimeError(result)
    return result


def _limited(work: Callable[..., bool | float], *arguments: Any) -> tuple[str, object]:
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a profiler may have a handler, which would not end this process
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, (data + MOST_MEMORY, data + MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        return "result", work(*arguments)
    except (MemoryError, RecursionError):
        return "much", None
    except Exception as error:  # noqa: BLE001 - of a library, on what a policy wrote
        return "raised", f"{type(error).__name__}: {error}"[:500]
