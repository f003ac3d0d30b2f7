"""Runs Megatron-core without CUDA: where its modules request a CUDA device, they get the CPU.

Megatron refers to CUDA in three ways: functions of ``torch.cuda``, the literal ``device="cuda"``, and methods of
tensors (``.cuda()``, and ``.type()`` compared with ``"torch.cuda.FloatTensor"``). In its modules, the name ``torch`` is
replaced by a stand-in that handles the first two, and the methods behave differently when they are called from
Megatron. Gloo exchanges tensors of unequal length via padded ones. Nothing outside ``megatron`` is affected, and no
arithmetic is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, wraps
from types import ModuleType
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import torch
import torch.distributed as dist
from torch import Tensor

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like", "ones_like")


def install() -> None:
    """Patch the modules of Megatron that are loaded so far; call again after loading others. No effect with CUDA."""
    if torch.cuda.is_available():
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, "torch", None) is torch:
            module.torch = _stand_in()  # type: ignore[attr-defined]
    _patch_tensor_methods()


class _Cuda(ModuleType):
    """``torch.cuda`` of a machine whose only device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return _CPU

    def synchronize(self, *_: object) -> None:
        """Do nothing: work on a CPU is synchronous."""

    def empty_cache(self) -> None:
        """Do nothing: a CPU has no cache to empty."""

    def get_rng_state(self, *_: object) -> Tensor:
        return torch.get_rng_state()

    def current_stream(self, *_: object) -> _Stream:
        return _Stream()

    default_stream = current_stream

    def stream(self, _: object) -> nullcontext[None]:
        return nullcontext()


class _Stream:
    """A stream and an event: work on a CPU is complete when the call returns."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def record_event(self, *_: object) -> _Stream:
        return self

    def synchronize(self) -> None: ...


class _Distributed(ModuleType):
    """``torch.distributed`` with two operations on tensors of unequal length, which gloo lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(self, outputs: list[Tensor], local: Tensor, group: Any = None) -> None:
        """Gather tensors, padded to the longest."""
        length = max(map(len, outputs))
        gathered = [local.new_empty(length, *local.shape[1:]) for _ in outputs]
        padding = local.new_zeros(length - len(local), *local.shape[1:])
        dist.all_gather(gathered, torch.cat([local, padding]), group=group)
        for output, values in zip(outputs, gathered, strict=True):
            output.copy_(values[: len(output)])

    def reduce_scatter(self, output: Tensor, inputs: list[Tensor], group: Any = None) -> None:
        """Sum the tensors of all ranks, and store the chunk of this rank."""
        total = torch.cat(inputs)
        dist.all_reduce(total, group=group)
        output.copy_(total.split([len(x) for x in inputs])[dist.get_rank(group)])


class _Torch(ModuleType):
    """The module ``torch`` with `_Cuda`, and with factories that allocate on the CPU instead of on CUDA."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@cache
def _stand_in() -> ModuleType:
    stand_in, cuda = _Torch("torch"), _Cuda("torch.cuda")
    cuda.Stream = cuda.Event = _Stream  # type: ignore[attr-defined]
    stand_in.cuda = cuda  # type: ignore[attr-defined]
    stand_in.distributed = _Distributed("torch.distributed")  # type: ignore[attr-defined]
    for name in _FACTORIES:
        setattr(stand_in, name, _on_cpu(getattr(torch, name)))
    return stand_in


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # without a device, there are no copies to speed up
        return make(*args, **kwargs)

    return made


@cache
def _patch_tensor_methods() -> None:
    """Patch methods of tensors, and two functions of Megatron that must behave differently on a CPU."""
    kind, move, module_move = Tensor.type, Tensor.cuda, torch.nn.Module.cuda

    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = kind(self, *args, **kwargs)
        if args or kwargs or not _is_megatron(sys._getframe(1)):
            return name
        # Megatron's optimizer does not support float64: report it as another full-precision type.
        return "torch.cuda." + name.removeprefix("torch.").replace("Double", "Float")

    def cuda(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if _is_megatron(sys._getframe(1)) else move(self, *args, **kwargs)

    def module_cuda(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return self if _is_megatron(sys._getframe(1)) else module_move(self, *args, **kwargs)

    Tensor.type, Tensor.cuda, torch.nn.Module.cuda = type_, cuda, module_cuda  # type: ignore[assignment,method-assign]
    # Recomputation saves and restores the states of a device's generator.
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda *_, **__: None
    # No random numbers are drawn, because dropout is always off and weights are loaded.
    megatron_random.CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
    megatron_random._set_cuda_rng_state = lambda *_, **__: None

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host


def _is_megatron(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("megatron.")
