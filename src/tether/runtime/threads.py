"""How many CPU threads to compute with, and how they wait. It imports no torch, which has to be loaded afterwards."""

from __future__ import annotations

import math
import os
from pathlib import Path

OMP_NUM_THREADS = "OMP_NUM_THREADS"
OMP_WAIT_POLICY, GOMP_SPINCOUNT = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
SPINS = 1_500
"""How often a thread looks whether the others are done before it sleeps: for 20 to 80 microseconds."""
CPU_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""Files that hold a container's CPU quota and its period in microseconds: of cgroups of version 2, and of version 1."""


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity mask and its container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for files in CPU_QUOTAS if (quota := _cpu_quota(files)) is not None]
    return max(1, min([cores, *map(math.ceil, quotas)]))


def _cpu_quota(files: tuple[str, ...]) -> float | None:
    try:
        quota, period = " ".join(Path(file).read_text() for file in files).split()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # there are no such files, or no limit ("max")
        return None


def limit_spinning() -> None:
    """Let threads that wait for others sleep soon, unless the environment says how they wait.

    GNU OpenMP's threads, which are PyTorch's on Linux, look for several milliseconds whether the others are done. That
    is longer than the time slice of another process, so where one shares the cores, a thread that waits can keep the
    very thread that it waits for from running. OpenMP reads the variable when torch is loaded.
    """
    if not {OMP_WAIT_POLICY, GOMP_SPINCOUNT} & os.environ.keys():
        os.environ[GOMP_SPINCOUNT] = str(SPINS)


def num_threads(configured: int | None = None) -> int:
    """Return the number of threads: the configured one, else that of ``OMP_NUM_THREADS``, else one per usable core.

    Every part of tether that computes asks this function. Processes that work at the same time on one machine, such as
    ranks and reward workers, divide the number.

    Raises:
        ValueError: ``OMP_NUM_THREADS`` is not a number.
    """
    if configured is not None:
        return configured
    variable = os.environ.get(OMP_NUM_THREADS, "").strip()
    if not variable:
        return usable_cores()
    outermost = variable.split(",")[0].strip()  # "4,2": a number for each level of nested parallelism
    if not (outermost.isascii() and outermost.isdecimal() and int(outermost) > 0):
        raise ValueError(f"{OMP_NUM_THREADS}={variable}: not a number of threads. Set it to 1 or more, or unset it")
    return int(outermost)
