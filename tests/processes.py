"""Processes that tests look at from outside."""

import psutil


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; one that ends between two questions has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
