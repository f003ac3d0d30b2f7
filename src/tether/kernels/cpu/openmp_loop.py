"""Compiled kernels: how they are compiled and called, and the number formats and functions that their bodies use.

numba compiles them, and PyTorch's own threads run them. Threads take `tasks` from a queue a few at a time, so that a
thread whose core is shared with another process takes fewer; kernels of a few microseconds divide the work evenly
(`share`). Each number is computed by one thread, in an order that depends on the task alone, so no result depends on
the number of threads or on which of them is faster.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, SupportsFloat, TypeAlias, TypeVar, cast

import numba
import numpy as np
import torch
from llvmlite import binding, ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from tether.kernels.cpu.kernel_signature import BFloat16s, Floats, Ints, Signature

_log = logging.getLogger(__name__)
# The OpenMP pool that PyTorch's kernels run in; a second pool would compete for the same cores.
pool = ctypes.CDLL(None)
for _name in ("omp_get_thread_num", "omp_get_num_threads"):
    binding.add_symbol(_name, ctypes.cast(getattr(pool, _name), ctypes.c_void_p).value)
_thread: Any = types.ExternalFunction("omp_get_thread_num", types.int32())
_threads: Any = types.ExternalFunction("omp_get_num_threads", types.int32())

CHUNKS = 16
"""Chunks that each thread takes if all are equally fast; small chunks keep the wait for the last thread short."""

_MATHS = {"reassoc", "contract", "arcp", "nsz"}  # sums may be reordered; NaN and infinity are preserved
f32 = cast("Callable[[SupportsFloat], float]", np.float32)
"""Converts to float32; mypy sees a float, so that sums of them type-check."""
Function = TypeVar("Function", bound=Callable[..., Any])


def inline(function: Function) -> Function:
    """Compile a function into each kernel that calls it."""
    return cast("Function", numba.njit(inline="always", fastmath=_MATHS)(function))


Call: TypeAlias = "tuple[int, ctypes.Array[ctypes.c_int64], dict[str, Tensor | float | None]]"
"""One call of a kernel: its address, its array of arguments, and the tensors whose addresses the array contains."""
recorded: ContextVar[list[Call] | None] = ContextVar("recorded", default=None)
"""The list that collects calls for `tether.kernels.cpu.recording`; None while nothing is recorded."""


class Kernel:
    """A compiled function that all of PyTorch's threads run; compiled, or read from disk, at the first call."""

    def __init__(self, body: Callable[..., None]) -> None:
        self.signature = Signature(body)
        self.name = self.signature.name
        self._body = body

    @cached_property
    def address(self) -> int:
        """Address of the compiled code."""
        options: Any = {"fastmath": _MATHS, "error_model": "numpy"}
        body = numba.njit(inline="always", **options)(self._body)
        signature = types.void(types.CPointer(types.int64))
        try:
            compiled: Any = numba.cfunc(signature, cache=True, **options)(self._entry(body))
        except RuntimeError:  # numba finds no folder to write to
            _warn_of_compilation()
            compiled = numba.cfunc(signature, **options)(self._entry(body))
        self._compiled = compiled  # owns the code
        return int(compiled.address)

    def _entry(self, body: Callable[..., None]) -> Callable[..., None]:
        """Return the entry point of the threads, which unpacks the array of arguments for the body.

        numba caches it next to the body's file and keys the cache by the variables of its closure. The fingerprint is
        such a variable, so that code compiled from another version of these files is not reused.
        """
        lines = ["def make(fingerprint):\n", *(f"    {line}\n" for line in self.signature.unpacking().splitlines())]
        # numba has inspect read the source at the entry's line, which has to be code: Python 3.13 tokenizes it.
        source = "\n" * (self._body.__code__.co_firstlineno - 2) + "".join([*lines, f"    return {self.name}\n"])
        code = compile(source, self._body.__code__.co_filename, "exec")
        called = {"carray": carray, "float_of": float_of, "address_of": address_of}
        space: dict[str, Any] = {**called, "body": body, **_ARRAYS}
        exec(code, space)
        entry: Callable[..., None] = space["make"](_fingerprint())
        entry.__module__, entry.__qualname__ = self._body.__module__, self.name
        return entry

    def __call__(self, **arguments: Tensor | float | None) -> None:
        """Run on all of PyTorch's threads; `Signature.pack` describes the arguments and errors."""
        array = self.signature.pack(**arguments)
        if (calls := recorded.get()) is not None:
            calls.append((self.address, array, arguments))
        run(self.address, array)


kernel = Kernel


def run(address: int, array: ctypes.Array[ctypes.c_int64]) -> None:
    """Run compiled code on all of PyTorch's threads."""
    pool.GOMP_parallel(ctypes.c_void_p(address), array, torch.get_num_threads(), 0)


@cache
def _warn_of_compilation() -> None:
    _log.warning(
        "the kernels are compiled again at each start, which takes some ten seconds: neither %s nor the user's cache "
        "can be written to. Set NUMBA_CACHE_DIR to a folder that can",
        Path(__file__).parent,
    )


@cache
def _fingerprint() -> int:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return int.from_bytes(sha256(b"".join(file.read_bytes() for file in files)).digest()[:7], "little")


def _pointer_to(typing: object, address: Any, like: Any) -> Any:
    """Generate `address` as a pointer to numbers of the type of `like`."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), code


pointer: Any = intrinsic(_pointer_to)


@inline
def array_bfloat16(address: int, shape: tuple[int, ...]) -> BFloat16s:
    """Return the array at an address."""
    return carray(pointer(address, np.uint16(0)), shape)


@inline
def array_float32(address: int, shape: tuple[int, ...]) -> Floats:
    """Return the array at an address."""
    return carray(pointer(address, np.float32(0)), shape)


@inline
def array_int64(address: int, shape: tuple[int, ...]) -> Ints:
    """Return the array at an address."""
    return carray(pointer(address, np.int64(0)), shape)


@inline
def array_uint32(address: int, shape: tuple[int, ...]) -> NDArray[np.uint32]:
    """Return the array of pairs of bfloat16 numbers at an address."""
    return carray(pointer(address, np.uint32(0)), shape)


_ARRAYS = {f.__name__: f for f in (array_bfloat16, array_float32, array_int64)}


def _keep_alive(typing: object, arrays: Any) -> Any:
    """Mark the last use of arrays: numba frees an array after its last use by name, even while its address is
    in use."""
    return types.void(arrays), lambda context, builder, signature, values: context.get_dummy_value()


keep_alive: Any = intrinsic(_keep_alive)


@inline
def address_of(array: NDArray[np.generic]) -> int:
    """Return the address of the first number; the array must be kept alive with `keep_alive`."""
    return np.int64(array.ctypes.data)  # type: ignore[return-value]


@inline
def float_of(bits: int) -> float:
    """Convert the 64 bits of an argument of compiled code to float32."""
    return f32(np.int64(bits).view(np.float64))


@inline
def load(bits: int | np.uint16) -> float:
    """Convert bfloat16 bits, which are the upper half of a float32, to float32."""
    return f32(np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32))


@inline
def rounded(number: float) -> np.uint16:
    """Round float32 to the nearest bfloat16, ties to even."""
    bits = np.float32(number).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@inline
def exp(x: float) -> float:
    """Return e^x: 2^n for the integer n nearest to x / log 2, times a polynomial in the remainder."""
    y = f32(x) * f32(1.4426950408889634)
    n = np.floor(y + f32(0.5))
    f = y - n
    power = f32(1.5403530e-4)
    power = power * f + f32(1.3333558e-3)
    power = power * f + f32(9.6181291e-3)
    power = power * f + f32(5.5504109e-2)
    power = power * f + f32(2.4022651e-1)
    power = power * f + f32(6.9314718e-1)
    power = power * f + f32(1)
    n = n if n > f32(-127) else f32(-127)  # NaN too: converted to an integer it would be arbitrary
    n = n if n < f32(128) else f32(128)
    scaled = power * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return f32(0) if y < f32(-126) else scaled


@inline
def sigmoid(x: float) -> float:
    """Return 1 / (1 + e^-x)."""
    return f32(1) / (f32(1) + exp(-x))


@inline
def silu(x: float) -> float:
    """Return x / (1 + e^-x)."""
    return x * sigmoid(x)


@inline
def capped(score: float, softcap: float) -> float:
    """Return softcap * tanh(score / softcap)."""
    e = exp(f32(-2) * abs(score) / softcap)
    size = softcap * (f32(1) - e) / (f32(1) + e)
    return size if score > 0 else -size


@inline
def share(count: int) -> tuple[int, int]:
    """Return the start and end of this thread's share of `count` items."""
    return count * _thread() // _threads(), count * (_thread() + 1) // _threads()


def _fetched(typing: object, address: Any, amount: Any) -> Any:
    """Generate an atomic addition of `amount` to the number at `address`; the result is the number before."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        number = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", number, arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), code


fetch_and_add: Any = intrinsic(_fetched)


@numba.njit
def chunks(queue: int, count: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (start, end) of `count` items from the queue until none is left.

    Args:
        queue: the kernel's argument of that name; a kernel can use it only once.
        count: total number of items over all threads.
        multiple: granularity of the ranges.
    """
    size = -(-count // (CHUNKS * _threads() * multiple)) * multiple
    first = fetch_and_add(queue, size)
    while first < count:
        yield first, min(first + size, count)
        first = fetch_and_add(queue, size)


@numba.njit
def tasks(queue: int, count: int) -> Iterator[int]:
    """Yield tasks from the queue, fetched a few at a time as by `chunks`, until all `count` are done."""
    for first, last in chunks(queue, count, 1):
        for task in range(first, last):  # noqa: UP028  numba has no `yield from`
            yield task
