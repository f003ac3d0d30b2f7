"""A call's kernels, recorded to be run again on the same memory, one after the other, without Python in between.

A decoding step is hundreds of kernels, with few rows of a few microseconds each, and starting each from Python takes
longer than many of them run. Whoever records a call and runs it again puts the new inputs where the old ones were, and
finds the results where the old ones were: what a CUDA graph is to CUDA's kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, TypeVar

import torch
from llvmlite import binding, ir
from numba import types
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from torch.utils._python_dispatch import TorchDispatchMode

from tether.kernels.cpu.avx512_instructions import Type, Typed, Value, instruction
from tether.kernels.cpu.kernel_signature import Ints, int64
from tether.kernels.cpu.openmp_loop import Call, array_int64, kernel, pool, recorded, share

Result = TypeVar("Result")

_HARMLESS = ("empty", "new_empty", "promote_types")
"""Beginnings of the names of operators that compute nothing; so do those that return views."""

binding.add_symbol("GOMP_barrier", ctypes.cast(pool.GOMP_barrier, ctypes.c_void_p).value)
_barrier: Any = types.ExternalFunction("GOMP_barrier", types.void())


def _run_kernel(typing: BaseContext, address: Type, arguments: Type) -> Typed:
    """Call the compiled code at `address` with the array at `arguments`."""

    def code(context: BaseContext, builder: ir.IRBuilder, _: Signature, values: Sequence[Value]) -> Value:
        numbers = ir.IntType(64).as_pointer()
        code = builder.inttoptr(values[0], ir.FunctionType(ir.VoidType(), [numbers]).as_pointer())
        builder.call(code, [builder.inttoptr(values[1], numbers)])
        return context.get_dummy_value()

    return types.void(address, arguments), code


_run = instruction(_run_kernel)


@kernel
def _run_all(calls: Annotated[Ints, int64("count", 3)], count: int) -> None:
    """Addresses of code, its arguments and its queue [C, 3]; each call waits for all threads of the one before."""
    for i in range(count):
        _run(calls[i, 0], calls[i, 1])
        _barrier()
        first, last = share(1)
        if first < last:  # for one thread only: the queue is full again for the next run
            array_int64(calls[i, 2], (1,))[0] = 0


class Recording:
    """The kernels of one call, with the memory that they work on."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls  # holds arguments and tensors: only their addresses are handed on
        self._addresses = torch.tensor([_addresses(code, array) for code, array, _ in calls]).view(-1, 3)

    def run(self) -> None:
        """Run them all again."""
        _run_all(calls=self._addresses)


def _addresses(code: int, array: ctypes.Array[ctypes.c_int64]) -> tuple[int, int, int]:
    start = ctypes.addressof(array)
    array[-1] = 0
    return code, start, start + ctypes.sizeof(array) - ctypes.sizeof(ctypes.c_int64)


def record(function: Callable[[], Result], *, watched: bool = True) -> tuple[Result, Recording | None]:
    """Call the function.

    Args:
        function: what to record.
        watched: look at all that PyTorch does in it, which takes longer than many kernels do. False where it is known
            to compute nothing.

    Returns:
        Its result, and its recording; None if PyTorch was seen to compute something in it besides the kernels.
    """
    calls: list[Call] = []
    token = recorded.set(calls)
    watch = _ComputationWatch()
    try:
        with watch if watched else nullcontext():
            result = function()
    finally:
        recorded.reset(token)
    return result, None if watch.computed else Recording(calls)


class _ComputationWatch(TorchDispatchMode):
    """Notices operators that compute."""

    computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.computed = self.computed or not (func.is_view or func.__name__.startswith(_HARMLESS))
        return func(*args, **(kwargs or {}))
