"""Speed and memory of a training step."""

from __future__ import annotations

import resource
import sys

import torch

GIB = 2**30


def throughput_metrics(num_tokens: int, seconds: float, *, num_devices: int = 1) -> dict[str, float]:
    """Return the speed of a step.

    Args:
        num_tokens: prompt and response tokens of the step.
        seconds: duration of the step.
        num_devices: number of devices that shared the work.
    """
    return {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / (seconds * num_devices),
    }


def memory_metrics() -> dict[str, float]:
    """Return the peak memory of this process so far, in GiB: of the host, and of the GPU if there is one."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    metrics = {"perf/cpu_memory_peak_gb": peak / GIB}
    if torch.cuda.is_available():
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / GIB
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / GIB
    return metrics
