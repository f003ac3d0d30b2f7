"""Number and waiting policy of CPU threads. This module does not import torch, which must be imported afterwards."""

from __future__ import annotations

import math
import os
from pathlib import Path

OMP_NUM_THREADS = "OMP_NUM_THREADS"
OMP_WAIT_POLICY, GOMP_SPINCOUNT = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
SPINS = 1_500
"""Number of checks by a waiting thread before it sleeps: 20 to 80 microseconds."""
MAX_THREADS = 4096
"""Maximum number of threads, more than any machine has cores; starting more could crash the process."""
CPU_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""Files with a container's CPU quota and period in microseconds: cgroups version 2, then version 1."""


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity mask and its container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for files in CPU_QUOTAS if (quota := _cpu_quota(files)) is not None]
    return max(1, min([cores, *map(math.ceil, quotas)]))


def _cpu_quota(files: tuple[str, ...]) -> float | None:
    try:
        quota, period = " ".join(Path(file).read_text() for file in files).split()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # the files do not exist, or there is no limit ("max")
        return None


def limit_spinning() -> None:
    """Make waiting threads sleep soon, unless the environment configures how they wait.

    GNU OpenMP's threads, which PyTorch uses on Linux, spin for several milliseconds. That is longer than the time slice
    of another process, so on shared cores a waiting thread can prevent the thread that it waits for from running.
    OpenMP reads the variable when torch is imported.
    """
    if not {OMP_WAIT_POLICY, GOMP_SPINCOUNT} & os.environ.keys():
        os.environ[GOMP_SPINCOUNT] = str(SPINS)


def num_threads(configured: int | None = None) -> int:
    """Return the number of threads: the configured one, or that of ``OMP_NUM_THREADS``, or one per usable core.

    All of tether's computations use this number of threads; concurrent processes on one machine, such as ranks and
    reward workers, divide it.

    Raises:
        ValueError: ``OMP_NUM_THREADS`` is not a number, or the number is above `MAX_THREADS`.
    """
    if configured is not None:
        if configured > MAX_THREADS:
            raise ValueError(f"{configured} CPU threads are too many: give at most {MAX_THREADS}")
        return configured
    variable = os.environ.get(OMP_NUM_THREADS, "").strip()
    if not variable:
        return usable_cores()
    outermost = variable.split(",")[0].strip()  # "4,2" has one number per level of nested parallelism
    if not (outermost.isascii() and outermost.isdecimal() and 0 < int(outermost) <= MAX_THREADS):
        raise ValueError(
            f"{OMP_NUM_THREADS}={variable}: not a number of threads. Set it from 1 to {MAX_THREADS}, or unset it"
        )
    return int(outermost)
