"""Records the kernels of a call, to run them again on the same memory without Python in between.

A decoding step is hundreds of kernels, with few rows of a few microseconds each, and starting each from Python takes
longer than many of them run. To reuse a recording, write new inputs to the memory of the old ones; the results appear
where the old ones were, as with a CUDA graph.
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
"""Prefixes of the names of operators that compute nothing; operators that return views compute nothing either."""

binding.add_symbol("GOMP_barrier", ctypes.cast(pool.GOMP_barrier, ctypes.c_void_p).value)
_barrier: Any = types.ExternalFunction("GOMP_barrier", types.void())


def _run_kernel(typing: BaseContext, address: Type, arguments: Type) -> Typed:
    """Generate a call of the compiled code at `address` with the array at `arguments`."""

    def code(context: BaseContext, builder: ir.IRBuilder, _: Signature, values: Sequence[Value]) -> Value:
        numbers = ir.IntType(64).as_pointer()
        code = builder.inttoptr(values[0], ir.FunctionType(ir.VoidType(), [numbers]).as_pointer())
        builder.call(code, [builder.inttoptr(values[1], numbers)])
        return context.get_dummy_value()

    return types.void(address, arguments), code


_run = instruction(_run_kernel)


@kernel
def _run_all(calls: Annotated[Ints, int64("count", 3)], count: int) -> None:
    """Run calls, given as addresses of code, arguments and queue [C, 3]; each call waits for all threads of the
    previous one."""
    for i in range(count):
        _run(calls[i, 0], calls[i, 1])
        _barrier()
        first, last = share(1)
        if first < last:  # one thread resets the queue for the next run
            array_int64(calls[i, 2], (1,))[0] = 0


class CpuRecording:
    """The kernels of one call, with the memory that they work on."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls  # owns arguments and tensors: compiled code receives only their addresses
        self._addresses = torch.tensor([_addresses(code, array) for code, array, _ in calls]).view(-1, 3)

    def run(self) -> None:
        _run_all(calls=self._addresses)


def _addresses(code: int, array: ctypes.Array[ctypes.c_int64]) -> tuple[int, int, int]:
    start = ctypes.addressof(array)
    array[-1] = 0
    return code, start, start + ctypes.sizeof(array) - ctypes.sizeof(ctypes.c_int64)


def record(function: Callable[[], Result], *, watched: bool = True) -> tuple[Result, CpuRecording | None]:
    """Call a function and record its kernels.

    Args:
        function: what to record.
        watched: check every PyTorch operator for computation, which takes longer than many kernels. Pass False if the
            function is known to compute nothing outside the kernels.

    Returns:
        The function's result, and its recording; None if PyTorch operators computed something besides the kernels.
    """
    calls: list[Call] = []
    token = recorded.set(calls)
    watch = _ComputationWatch()
    try:
        with watch if watched else nullcontext():
            result = function()
    finally:
        recorded.reset(token)
    return result, None if watch.computed else CpuRecording(calls)


class _ComputationWatch(TorchDispatchMode):
    """Notices operators that compute something."""

    computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.computed = self.computed or not (func.is_view or func.__name__.startswith(_HARMLESS))
        return func(*args, **(kwargs or {}))
