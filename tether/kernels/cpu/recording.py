"""A call's loops, kept to be run again on the same memory, one after the other, without Python in between.

A decoding step is hundreds of loops, with few rows of a few microseconds each, and starting each from Python takes
longer than many of them run. Whoever records a call and runs it again puts the new inputs where the old ones were, and
finds the results where the old ones were: what a CUDA graph is to kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from llvmlite import binding, ir
from numba import carray, types
from numba.extending import intrinsic
from torch.utils._python_dispatch import TorchDispatchMode

from tether.kernels.cpu.openmp_loop import Loop, pool, recorded

Result = TypeVar("Result")

_HARMLESS = ("empty", "new_empty", "promote_types")
"""Beginnings of the names of operators that compute nothing, beside those that only look at memory another way."""

binding.add_symbol("GOMP_barrier", ctypes.cast(pool.GOMP_barrier, ctypes.c_void_p).value)
_barrier: Any = types.ExternalFunction("GOMP_barrier", types.void())


def _run_loop(typing: Any, address: Any, arguments: Any) -> Any:
    """Call the loop at `address` with the array at `arguments`."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        numbers = ir.IntType(64).as_pointer()
        loop = builder.inttoptr(values[0], ir.FunctionType(ir.VoidType(), [numbers]).as_pointer())
        builder.call(loop, [builder.inttoptr(values[1], numbers)])
        return context.get_dummy_value()

    return types.void(address, arguments), code


_run: Any = intrinsic(_run_loop)


@Loop
def _chain(p: Any) -> None:
    """How many, then of each loop its address and that of its arguments; each waits for all threads of the last."""
    count = carray(p, (1,))[0]
    calls = carray(p, (1 + 2 * count,))
    for i in range(count):
        _run(calls[1 + 2 * i], calls[2 + 2 * i])
        _barrier()


class Recording:
    """The loops of one call, with the memory that they work on."""

    def __init__(self, calls: list[tuple[int, Any, Any]]) -> None:
        self._calls = calls  # holds arguments and tensors: only their addresses are in the array
        addresses = [number for loop, array, _ in calls for number in (loop, ctypes.addressof(array))]
        self._array = (ctypes.c_int64 * (1 + len(addresses)))(len(calls), *addresses)

    def run(self) -> None:
        """Run them all again."""
        _chain.run(self._array)


def record(function: Callable[[], Result], *, watched: bool = True) -> tuple[Result, Recording | None]:
    """Call the function.

    Args:
        function: what to record.
        watched: look at all that PyTorch does in it, which takes longer than many loops do. False where it is known to
            compute nothing.

    Returns:
        Its result, and its recording; None if PyTorch was seen to compute something in it beside the loops.
    """
    calls: list[tuple[int, Any, Any]] = []
    token = recorded.set(calls)
    watch = _Watch()
    try:
        with watch if watched else nullcontext():
            result = function()
    finally:
        recorded.reset(token)
    return result, None if watch.computed else Recording(calls)


class _Watch(TorchDispatchMode):
    """Notices operators that compute."""

    computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.computed = self.computed or not (func.is_view or func.__name__.startswith(_HARMLESS))
        return func(*args, **(kwargs or {}))
