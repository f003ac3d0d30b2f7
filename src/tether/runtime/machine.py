"""This machine: which device, how many threads."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tether.runtime.threads import num_threads

CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "cache"),
)
"""Folder of a container's memory, its files with the limit and the use, and how ``memory.stat`` calls the part of that
use which is cached files: of version 2, and of version 1."""


def resolve_device(name: str, key: str = "trainer.device") -> torch.device:
    """Turn ``trainer.device`` into a device; ``auto`` takes an accelerator if there is one.

    Args:
        name: auto, cuda, mps or cpu.
        key: what it was given by, for messages.

    Raises:
        ValueError: there is no such device, or none here.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, here in available.items() if here))
    if not available.get(name):
        here = ", ".join(kind for kind, ready in available.items() if ready)
        if name not in available:
            raise ValueError(f"{key}={name}: is no device. Available: {here}, or set it to auto")
        raise ValueError(f"{key}: {name} is not available to torch here. Available: {here}, or set it to auto")
    return torch.device(name)


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for bfloat16; without them float32 is several times as fast."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Have CUDA add in a fixed order, so that a resumed run gets the bits of the uninterrupted one.

    PyTorch's default there is kernels whose threads add as they finish: the backward pass of attention, of an embedding
    or of a convolution then differs from call to call. Other devices have no such kernels.

    Raises (from within):
        RuntimeError: an operation that has no such kernel; PyTorch names it.
    """
    if not torch.cuda.is_initialized():
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch refuses matrix products without it
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no kernel here reads memory that nothing wrote
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def cuda_names(count: int) -> list[str]:
    """Names that ``CUDA_VISIBLE_DEVICES`` gives the first CUDA devices of this process."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (named.split(",") if named else [str(number) for number in range(count)])[:count]


def set_threads(configured: int | None) -> None:
    """Let torch use the number of CPU threads that `tether.runtime.threads.num_threads` returns."""
    torch.set_num_threads(num_threads(configured))


def give_memory_back() -> None:
    """Return freed memory to the system: glibc keeps what it might need again, of a run that ended gigabytes."""
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def available_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken on a device, swap space included; None: it does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        free = [(kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0)) * 1024]
    except (OSError, KeyError, ValueError):
        return None
    for folder, limit, used, cached in CGROUPS:
        try:
            cache = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())[cached]
            free.append(int((folder / limit).read_text()) - int((folder / used).read_text()) + int(cache))
        except (OSError, KeyError, ValueError):  # there is no such file, or no limit
            continue
    return min(free)
