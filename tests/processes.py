"""Processes that tests look at from outside, and that may end between two questions."""

import psutil


def runs(process: psutil.Process | int) -> bool:
    """Whether it has not ended; a zombie has.

    Args:
        process: or its number.
    """
    try:
        if isinstance(process, int):
            process = psutil.Process(process)
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> str:
    """The line that started it, empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
