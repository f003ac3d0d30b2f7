"""Chooses the kernel backend for an operation by device, dtype and installed packages.

A backend's method may leave shapes that its kernel does not support to the reference.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from tether.kernels.cuda.backend import Cuda
from tether.kernels.reference import Reference

_log = logging.getLogger(__name__)
REFERENCE = Reference()


def kernels_for(*tensors: Tensor) -> Reference:
    """Return the backend for the device and dtype of these tensors, or the reference where they differ."""
    first, *others = tensors
    device, dtype = first.device.type, first.dtype
    if any(x.dtype != dtype or x.device.type != device for x in others):
        return REFERENCE
    return backend(device, dtype)


@cache
def backend(device: str, dtype: torch.dtype) -> Reference:
    """Return the backend for tensors of one device and dtype, and log once which it is."""
    chosen = _choose(device, dtype)
    _log.info("kernels for %s on %s: %s", dtype, device, chosen.describe())
    return chosen


def _choose(device: str, dtype: torch.dtype) -> Reference:
    if device == "cpu" and dtype == torch.bfloat16 and _has_gnu_openmp() and find_spec("numba") is not None:
        # Imported here, because importing numba takes time that other devices need not spend.
        from tether.kernels.cpu.backend import Cpu

        return Cpu()
    if device == "cuda" and dtype != torch.float64:  # Triton's kernels do not support float64
        return Cuda()
    return REFERENCE


def _has_gnu_openmp() -> bool:
    """Return whether PyTorch's threads are those of GNU OpenMP, which the compiled kernels run in."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "GOMP_parallel")
