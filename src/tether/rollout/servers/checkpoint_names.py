"""Weights as a server reads them from a checkpoint on the hub, whose names are not always those of the model in memory.

Adapters are added into the layers that they change, or kept apart; experts that lie in one tensor are handed on one by
one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_ADAPTED = re.compile(r"(.+)\.(base_layer\.weight|lora_A\.\w+\.weight|lora_B\.\w+\.weight)")
_ADAPTER = re.compile(r"(.+)\.(lora_[AB])\.\w+\.weight")
_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


def checkpoint_weights(tensors: Iterable[tuple[str, Tensor]], lora_scale: float) -> Iterator[tuple[str, Tensor]]:
    """The same weights under their names in a checkpoint, as they come.

    Args:
        tensors: of a model's ``state_dict``, maybe with adapters of peft: ``W x + lora_scale B A x``.
        lora_scale: alpha / rank; of no effect where there is no adapter.
    """
    waiting: dict[str, dict[str, Tensor]] = {}  # layer -> parts that have come
    for name, value in tensors:
        if match := _ADAPTED.fullmatch(name):
            layer, part = match.groups()
            parts = waiting.setdefault(layer, {})
            parts[part.split(".")[0]] = value.detach()
            if len(parts) == 3:
                yield f"{layer}.weight", _merged(**waiting.pop(layer), scale=lora_scale)
        elif match := _EXPERTS.fullmatch(name):
            yield from _one_by_one(match[1], match[2], value)
        else:
            yield name.replace(".base_layer.bias", ".bias"), value
    assert not waiting, f"adapters without a layer: {sorted(waiting)}"


def without_adapters(
    tensors: Iterable[tuple[str, Tensor]], adapters: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Like `checkpoint_weights`, but of the layers as they are without adapters.

    Args:
        tensors: see there.
        adapters: is given what adapters have, by peft's names in a file, as they come.
    """

    def layers() -> Iterator[tuple[str, Tensor]]:
        for name, value in tensors:
            if match := _ADAPTER.fullmatch(name):
                adapters[f"base_model.model.{match[1]}.{match[2]}.weight"] = value
            else:
                yield name.replace(".base_layer.", "."), value

    return checkpoint_weights(layers(), lora_scale=1.0)


def _merged(base_layer: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """[out, in] W + scale B A, computed in float32 at least."""
    precise = torch.promote_types(base_layer.dtype, torch.float32)
    weight, down, up = (value.to(precise) for value in (base_layer, lora_A, lora_B))
    return torch.addmm(weight, up, down, alpha=scale).to(base_layer.dtype)


def _one_by_one(experts: str, kind: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Of [E, out, in]; gate and up stand on top of each other."""
    for number, expert in enumerate(value.detach()):
        if kind == "down_proj":
            yield f"{experts}.{number}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{experts}.{number}.gate_proj.weight", gate
            yield f"{experts}.{number}.up_proj.weight", up
