"""CUDA graphs on the CPU: a call's operators are noted without effect, and run again on the same memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tether.kernels.cuda.backend import Cuda

READS_BACK = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique")


class _Capture(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__.split(".")[0], kwargs or {}
        if name in READS_BACK:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        if name.startswith("index") and any(x.dtype == torch.bool for x in tree_leaves(args[1]) if x is not None):
            raise RuntimeError(f"{name} by a mask: operation not permitted when stream is capturing")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before.append((value, value.clone()))
        found = func(*args, **kwargs)
        if not func.is_view:
            self.calls.append((func, args, kwargs, [x for x in tree_leaves(found) if isinstance(x, Tensor)]))
        return found


class _Graph:
    def __init__(self, calls: list[tuple[Any, Any, Any, list[Tensor]]]) -> None:
        self.calls, self.runs = calls, 0

    def run(self) -> None:
        self.runs += 1
        for func, args, kwargs, outputs in self.calls:
            found = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for old, new in zip(outputs, found, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class GraphsOnCpu(Cuda):
    """The CUDA backend, on the CPU, without packages and with these graphs."""

    _liger = _flash = None

    def __init__(self) -> None:
        self.graphs: list[_Graph] = []

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        with _Capture() as mode:
            result = function()
        for tensor, before in reversed(mode.before):
            tensor.copy_(before)
        for *_, outputs in mode.calls:  # what is new holds nothing yet
            for output in outputs:
                if not any(output.data_ptr() == written.data_ptr() for written, _ in mode.before):
                    output.fill_(99)
        self.graphs.append(_Graph(mode.calls))
        return result, self.graphs[-1]
