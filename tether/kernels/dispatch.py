"""Where the compiled loops of `tether.models` run, and are replayed."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor


def loops_for(*tensors: Tensor) -> ModuleType | None:
    """The module of loops if it can compute with these: bfloat16 on a CPU whose threads are GNU OpenMP's; else None."""
    if all(x.dtype == torch.bfloat16 and x.device.type == "cpu" for x in tensors):
        return _loops()
    return None


def multiplying_for(*tensors: Tensor) -> ModuleType | None:
    """The module of loops that multiply, where `loops_for` gives one: by AMX (`tether.kernels.cpu.linear_amx`) or
    AVX512_BF16 (`tether.kernels.cpu.linear_avx512`); None where there is neither."""
    if loops_for(*tensors) is None:
        return None
    if import_module("tether.kernels.cpu.amx_instructions").has_tiles():
        return import_module("tether.kernels.cpu.linear_amx")
    return (
        import_module("tether.kernels.cpu.linear_avx512")
        if import_module("tether.kernels.cpu.avx512_instructions").has_products()
        else None
    )


def pieces_for(*tensors: Tensor) -> ModuleType | None:
    """The module of attention over packed pieces, where `loops_for` gives one and there is AVX512_BF16; else None."""
    if loops_for(*tensors) is None:
        return None
    return (
        import_module("tether.kernels.cpu.packed_attention")
        if import_module("tether.kernels.cpu.avx512_instructions").has_products()
        else None
    )


def replay_for(*tensors: Tensor) -> ModuleType | None:
    """The module that records and replays loops, where `loops_for` gives one; else None."""
    return None if loops_for(*tensors) is None else import_module("tether.kernels.cpu.recording")


@cache
def _loops() -> ModuleType | None:
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return None
    return import_module(
        "tether.kernels.cpu.elementwise"
    )  # with numba, which takes a moment that other devices need not spend
