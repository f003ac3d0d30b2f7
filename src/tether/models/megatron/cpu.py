"""Runs Megatron-core without CUDA: where its own modules ask for a CUDA device, they get the CPU.

Megatron names CUDA in three ways: functions of ``torch.cuda``, the literal ``device="cuda"``, and methods of tensors
(``.cuda()``, and ``.type()`` compared with ``"torch.cuda.FloatTensor"``). Its modules get a stand-in for the name
``torch`` that answers the first two, and the two methods answer code of Megatron differently than anyone else's.
Gloo, for its part, moves tensors of unlike length by way of equal ones. Nothing outside ``megatron`` sees a difference,
and no arithmetic is replaced.
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
    """Redirect what is loaded of Megatron so far; once more for what was loaded since. Without effect beside CUDA."""
    if torch.cuda.is_available():
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, "torch", None) is torch:
            module.torch = _stand_in()  # type: ignore[attr-defined]
    _answer_megatron_differently()


class _Cuda(ModuleType):
    """``torch.cuda`` of a machine whose only device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return _CPU

    def synchronize(self, *_: object) -> None:
        """Nothing runs beside the caller."""

    def empty_cache(self) -> None:
        """There is none."""

    def get_rng_state(self, *_: object) -> Tensor:
        return torch.get_rng_state()

    def current_stream(self, *_: object) -> _Stream:
        return _Stream()

    default_stream = current_stream

    def stream(self, _: object) -> nullcontext[None]:
        return nullcontext()


class _Stream:
    """A stream, and an event in one: work on a CPU is done when it was asked for."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def record_event(self, *_: object) -> _Stream:
        return self

    def synchronize(self) -> None: ...


class _Distributed(ModuleType):
    """``torch.distributed`` with the two operations on parts of unlike length that gloo lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(self, parts: list[Tensor], part: Tensor, group: Any = None) -> None:
        """Gather the parts, filled up to the longest."""
        longest = max(map(len, parts))
        filled = [part.new_empty(longest, *part.shape[1:]) for _ in parts]
        dist.all_gather(filled, torch.cat([part, part.new_zeros(longest - len(part), *part.shape[1:])]), group=group)
        for to, found in zip(parts, filled, strict=True):
            to.copy_(found[: len(to)])

    def reduce_scatter(self, part: Tensor, parts: list[Tensor], group: Any = None) -> None:
        """Sum all parts everywhere, and keep this rank's."""
        total = torch.cat(parts)
        dist.all_reduce(total, group=group)
        part.copy_(total.split([len(one) for one in parts])[dist.get_rank(group)])


class _Torch(ModuleType):
    """The module ``torch``, with `_Cuda` and with factories that make on the CPU what is asked for on CUDA."""

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
        kwargs.pop("pin_memory", None)  # for faster copies to a device
        return make(*args, **kwargs)

    return made


@cache
def _answer_megatron_differently() -> None:
    """Methods of tensors, and two places of Megatron where the CPU needs an answer of its own."""
    kind, move, module_move = Tensor.type, Tensor.cuda, torch.nn.Module.cuda

    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kind(self, *args, **kwargs)
        if args or kwargs or not _is_megatron(sys._getframe(1)):
            return found
        # Megatron's optimizer knows no float64: for it that is another full-precision number, to be left as it is.
        return "torch.cuda." + found.removeprefix("torch.").replace("Double", "Float")

    def cuda(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if _is_megatron(sys._getframe(1)) else move(self, *args, **kwargs)

    def module_cuda(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return self if _is_megatron(sys._getframe(1)) else module_move(self, *args, **kwargs)

    Tensor.type, Tensor.cuda, torch.nn.Module.cuda = type_, cuda, module_cuda  # type: ignore[assignment,method-assign]
    # Recomputation keeps and restores the states of a device's generator.
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda *_, **__: None
    # No random numbers are drawn: dropout is always off and weights are loaded.
    megatron_random.CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
    megatron_random._set_cuda_rng_state = lambda *_, **__: None

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host


def _is_megatron(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("megatron.")
