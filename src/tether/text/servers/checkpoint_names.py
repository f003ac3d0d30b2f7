"""Converts the names of weights in memory to those in a checkpoint on the hub, which servers expect.

Adapters are merged into their layers or sent separately; experts in one tensor are split into one tensor each.
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
    """Yield the weights under their names in a checkpoint.

    Args:
        tensors: entries of a model's ``state_dict``, possibly with peft's adapters: ``W x + lora_scale B A x``.
        lora_scale: alpha / rank; ignored without adapters.
    """
    waiting: dict[str, dict[str, Tensor]] = {}  # layer -> tensors that have arrived
    for name, value in tensors:
        if match := _ADAPTED.fullmatch(name):
            layer, kind = match.groups()
            tensors_of_layer = waiting.setdefault(layer, {})
            tensors_of_layer[kind.split(".")[0]] = value.detach()
            if len(tensors_of_layer) == 3:
                yield f"{layer}.weight", _merged(**waiting.pop(layer), scale=lora_scale)
        elif match := _EXPERTS.fullmatch(name):
            yield from _split_experts(match[1], match[2], value)
        else:
            yield name.replace(".base_layer.bias", ".bias"), value
    assert not waiting, f"adapters without a layer: {sorted(waiting)}"


def without_adapters(
    tensors: Iterable[tuple[str, Tensor]], adapters: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights as `checkpoint_weights` does, with layers as they are without their adapters.

    Args:
        tensors: as for `checkpoint_weights`.
        adapters: is filled with the adapters' tensors, under the names that peft uses in a file.
    """

    def layers() -> Iterator[tuple[str, Tensor]]:
        for name, value in tensors:
            if match := _ADAPTER.fullmatch(name):
                adapters[f"base_model.model.{match[1]}.{match[2]}.weight"] = value
            else:
                yield name.replace(".base_layer.", "."), value

    return checkpoint_weights(layers(), lora_scale=1.0)


def _merged(base_layer: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """Return [out, in] W + scale B A, computed in at least float32."""
    precise = torch.promote_types(base_layer.dtype, torch.float32)
    weight, down, up = (value.to(precise) for value in (base_layer, lora_A, lora_B))
    return torch.addmm(weight, up, down, alpha=scale).to(base_layer.dtype)


def _split_experts(experts: str, kind: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split [E, out, in] into experts; gate and up are concatenated along the outputs."""
    for index, expert in enumerate(value.detach()):
        if kind == "down_proj":
            yield f"{experts}.{index}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{experts}.{index}.gate_proj.weight", gate
            yield f"{experts}.{index}.up_proj.weight", up
