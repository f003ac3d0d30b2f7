"""Which maker computes an operation: chosen by device, dtype and what is installed, in this one place.

A maker's method may leave shapes that its kernel does not take to the reference.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from tether.kernels.cuda.maker import Cuda
from tether.kernels.reference import Reference

_log = logging.getLogger(__name__)
REFERENCE = Reference()


def kernels_for(*tensors: Tensor) -> Reference:
    """The maker for operations on these tensors: that of their device and dtype, or the reference where they differ."""
    first, *others = tensors
    device, dtype = first.device.type, first.dtype
    if any(x.dtype != dtype or x.device.type != device for x in others):
        return REFERENCE
    return maker(device, dtype)


@cache
def maker(device: str, dtype: torch.dtype) -> Reference:
    """The maker for tensors of one device and dtype; the log says once which it is."""
    chosen = _choose(device, dtype)
    _log.info("kernels for %s on %s: %s", dtype, device, chosen.describe())
    return chosen


def _choose(device: str, dtype: torch.dtype) -> Reference:
    if device == "cpu" and dtype == torch.bfloat16 and _has_gnu_openmp() and find_spec("numba") is not None:
        # Imported here: numba takes a moment that other devices need not spend.
        from tether.kernels.cpu.maker import Cpu

        return Cpu()
    if device == "cuda" and dtype != torch.float64:  # which Triton's kernels do not take
        return Cuda()
    return REFERENCE


def _has_gnu_openmp() -> bool:
    """Whether PyTorch's threads are those of GNU OpenMP, which the compiled kernels run in."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "GOMP_parallel")
