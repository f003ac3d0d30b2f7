"""This machine: which device, how many threads."""

from __future__ import annotations

import os

import torch


def resolve_device(name: str) -> torch.device:
    """Turn ``trainer.device`` into a device; ``auto`` takes an accelerator if there is one.

    Raises:
        ValueError: the device that was asked for is not here.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, here in available.items() if here))
    if not available[name]:
        here = ", ".join(kind for kind, ready in available.items() if ready)
        raise ValueError(f"trainer.device: {name} is not available to torch here. Available: {here}, or set it to auto")
    return torch.device(name)


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for bfloat16; without them float32 is several times as fast."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(count: int | None) -> None:
    """Let torch use `count` CPU threads; None takes every core that this process may run on."""
    torch.set_num_threads(count or usable_cores())
