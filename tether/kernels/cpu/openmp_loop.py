"""What compiled loops are made of: how they are called, and numbers in memory.

numba compiles them, and brings its compiler with it; PyTorch's own threads run them. Each thread takes an even share
of what there is to do, and each number is made by one thread, so that no result depends on how many threads there are.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding, ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

# The pool that PyTorch's kernels run in; threads of another one would wait for the same cores.
pool = ctypes.CDLL(None)
for _name in ("omp_get_thread_num", "omp_get_num_threads"):
    binding.add_symbol(_name, ctypes.cast(getattr(pool, _name), ctypes.c_void_p).value)
_thread: Any = types.ExternalFunction("omp_get_thread_num", types.int32())
_threads: Any = types.ExternalFunction("omp_get_num_threads", types.int32())

_MATHS = {"reassoc", "contract", "arcp", "nsz"}  # sums in any order; NaN and infinity stay what they are
inline: Any = numba.njit(inline="always", fastmath=_MATHS)

recorded: ContextVar[list[tuple[int, Any, Any]] | None] = ContextVar("recorded", default=None)
"""Where calls are noted for `tether.kernels.cpu.recording`: a loop's address, its numbers, and what they came from."""


class Loop:
    """A compiled function of one array of numbers; compiled, or read from the disk, when it is first called."""

    def __init__(self, body: Callable[[Any], None]) -> None:
        self._body = body
        self.name = body.__name__

    @cached_property
    def _compiled(self) -> Any:
        options: Any = {"fastmath": _MATHS, "error_model": "numpy"}
        signature = types.void(types.CPointer(types.int64))
        try:
            return numba.cfunc(signature, cache=True, **options)(self._body)
        except RuntimeError:  # neither this folder nor the user's cache can be written to
            return numba.cfunc(signature, **options)(self._body)

    def __call__(self, *arguments: int | float | Tensor) -> None:
        """Run on all of PyTorch's threads: sizes are handed on as they are, tensors as addresses, floats as bits."""
        numbers = (x if isinstance(x, int) else x.data_ptr() if isinstance(x, Tensor) else _bits(x) for x in arguments)
        array = (ctypes.c_int64 * len(arguments))(*numbers)
        if (calls := recorded.get()) is not None:
            calls.append((self._compiled.address, array, arguments))
        self.run(array)

    def run(self, array: Any) -> None:
        """Run with arguments that are numbers in an array already."""
        pool.GOMP_parallel(ctypes.c_void_p(self._compiled.address), array, torch.get_num_threads(), 0)


def _bits(number: float) -> int:
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


def _pointer_to(typing: Any, address: Any, like: Any) -> Any:
    """`address` as a pointer to numbers of the type of `like`."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), code


pointer: Any = intrinsic(_pointer_to)


@inline
def bfloat16s(address: Any, shape: Any) -> Any:
    """The array of bfloat16 numbers, as whole numbers of 16 bits, that lies at an address."""
    return carray(pointer(address, np.uint16(0)), shape)


@inline
def float32s(address: Any, shape: Any) -> Any:
    """The array of float32 numbers that lies at an address."""
    return carray(pointer(address, np.float32(0)), shape)


@inline
def keep(array: Any) -> None:
    """Stands where an array was last needed: numba frees what is not named any more, whoever has its address."""
    array.ravel()[0] = 0


@inline
def float_of(bits: Any) -> Any:
    """A float among a loop's arguments."""
    return np.float32(np.int64(bits).view(np.float64))


@inline
def load(number: Any) -> Any:
    """bfloat16 -> float32: the upper half of it."""
    return np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)


@inline
def rounded(number: Any) -> Any:
    """float32 -> the nearest bfloat16, of two the even one."""
    bits = np.float32(number).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@inline
def exp(x: Any) -> Any:
    """e^x: 2^n of the nearest whole n to x / log 2, times a polynomial in the rest of it."""
    y = np.float32(x) * np.float32(1.4426950408889634)
    n = np.floor(y + np.float32(0.5))
    f = y - n
    power = np.float32(1.5403530e-4)
    power = power * f + np.float32(1.3333558e-3)
    power = power * f + np.float32(9.6181291e-3)
    power = power * f + np.float32(5.5504109e-2)
    power = power * f + np.float32(2.4022651e-1)
    power = power * f + np.float32(6.9314718e-1)
    power = power * f + np.float32(1)
    n = n if n > np.float32(-127) else np.float32(-127)  # NaN too: as a whole number it would be anything
    n = n if n < np.float32(128) else np.float32(128)
    scaled = power * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0) if y < np.float32(-126) else scaled


@inline
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return np.float32(1) / (np.float32(1) + exp(-x))


@inline
def silu(x: Any) -> Any:
    """x / (1 + e^-x)."""
    return x * sigmoid(x)


@inline
def capped(score: Any, softcap: Any) -> Any:
    """softcap * tanh(score / softcap)."""
    e = exp(np.float32(-2) * abs(score) / softcap)
    size = softcap * (np.float32(1) - e) / (np.float32(1) + e)
    return size if score > 0 else -size


@inline
def share(count: Any) -> Any:
    """First and last (excluded) of this thread's share of `count` things."""
    return count * _thread() // _threads(), count * (_thread() + 1) // _threads()
