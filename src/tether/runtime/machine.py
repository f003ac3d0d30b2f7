"""Devices, threads and memory of this machine."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tether.runtime.threads import num_threads

CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "cache"),
)
"""For cgroups version 2, then version 1: folder of a container's memory group, its files with limit and usage, and the
name of the file cache in ``memory.stat``."""
BETWEEN_RETURNS = 300.0
"""Minimum seconds between two returns of freed memory in a run, so that they cost at most 1 % of the time."""
_returned = time.monotonic()


def resolve_device(name: str, key: str = "trainer.device") -> torch.device:
    """Return the device of ``trainer.device``; ``auto`` selects an accelerator if one is available.

    Args:
        name: auto, cuda, mps or cpu.
        key: configuration key or option, for messages.

    Raises:
        ValueError: the device is unknown or not available.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, names in available.items() if names))
    if not available.get(name):
        names = ", ".join(kind for kind, ready in available.items() if ready)
        if name not in available:
            raise ValueError(f"{key}={name}: is no device. Available: {names}, or set it to auto")
        raise ValueError(f"{key}: {name} is not available to torch here. Available: {names}, or set it to auto")
    return torch.device(name)


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether a device has bfloat16 instructions; if not, float32 is several times as fast."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Make CUDA sum in a fixed order, so that a resumed run is bitwise equal to the uninterrupted one.

    By default, threads of PyTorch's CUDA kernels sum in the order in which they finish, so the backward pass of
    attention, embeddings and convolutions differs between calls. Other devices have no such kernels.

    Raises (inside the block):
        RuntimeError: an operation has no deterministic kernel; PyTorch names it.
    """
    if not torch.cuda.is_initialized():
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch requires it for matrix products
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no kernel reads uninitialized memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def cuda_names(count: int) -> list[str]:
    """Return the names of this process's first CUDA devices for ``CUDA_VISIBLE_DEVICES``."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (named.split(",") if named else [str(number) for number in range(count)])[:count]


def set_threads(configured: int | None) -> None:
    """Set torch's number of CPU threads to `tether.runtime.threads.num_threads`."""
    torch.set_num_threads(num_threads(configured))


def release_memory() -> None:
    """Return freed memory to the operating system; after a run, glibc would otherwise keep gigabytes."""
    gc.collect()
    _trim()


def _trim() -> None:
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def release_memory_periodically() -> None:
    """Return free memory that glibc keeps, unless that was done less than `BETWEEN_RETURNS` seconds ago.

    Micro-batches differ in their number of tokens, so memory freed by one seldom fits the next: in a run of half a
    billion weights with LoRA, 5.8 of 13 resident GiB were free. Each GiB that is allocated again costs half a second.
    """
    global _returned
    if time.monotonic() - _returned >= BETWEEN_RETURNS:
        _trim()
        _returned = time.monotonic()


def available_memory(device: torch.device) -> int | None:
    """Return the available bytes of a device, including swap space; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
        free = [(kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0)) * 1024]
    except (OSError, KeyError, ValueError):
        return None
    for folder, limit, used, cached in CGROUPS:
        try:
            cache = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())[cached]
            free.append(int((folder / limit).read_text()) - int((folder / used).read_text()) + int(cache))
        except (OSError, KeyError, ValueError):  # the file does not exist, or there is no limit
            continue
    return min(free)
