"""LoRA adapters inside Megatron's linear layers: ``W x + scale B A x``.

If a layer's outputs are split over tensor-parallel ranks, A is replicated and B has the rows of the weight's shard; if
its inputs are split, A has the columns of the shard and B is replicated. Ranks exchange ``A x``, which is as narrow as
the adapter's rank, and never its product with B.

Megatron fuses several linear layers of transformers: query, key and value; gate and up. Their A are stacked, and the
rows of their B are in the order of the fused weight; each row reads the outputs of its layer's A. A fused layer without
an adapter has zeros in A and B; their gradients are zero, so AdamW does not change them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as groups
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tether.integrations.megatron.files import LoadedTensors
from tether.integrations.megatron.mapping import COLUMNS, REPLICATED, TensorMapping
from tether.integrations.megatron.splits import Replicated

DOWN, UP = "lora_A.default.weight", "lora_B.default.weight"
"""Names of A and B in a layer with an adapter of peft."""


@dataclass(frozen=True)
class MegatronAdapters:
    """The linear layers of a transformers model that have an adapter, by name."""

    rank: int
    scale: float
    layers: frozenset[str]
    sizes: Mapping[str, tuple[int, int]]
    """Name -> (outputs, inputs) of all linear layers, with and without adapters."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> MegatronAdapters | None:
        """Return the adapters that peft inserted into a model, which may be on the meta device; None if there are
        none."""
        if not hasattr(model, "peft_config"):
            return None
        config: Any = model.peft_config["default"]
        sizes = {
            name.removesuffix(".base_layer"): (module.out_features, module.in_features)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and ".lora_" not in name
        }
        layers = frozenset(name.removesuffix(f".{DOWN}") for name, _ in model.named_parameters() if name.endswith(DOWN))
        return cls(config.r, config.lora_alpha / config.r, layers, sizes)

    def mappings(self, weight: TensorMapping) -> tuple[TensorMapping, ...]:
        """Return the mappings of A and B of the linear layer with this weight; empty if it has no adapter."""
        layers = [name.removesuffix(".weight") for name in weight.hf_names]
        if weight.layer is None or self.layers.isdisjoint(layers):
            return ()
        splits_inputs = weight.split == COLUMNS
        prefix = weight.name.removesuffix("weight")
        return tuple(
            TensorMapping(f"{prefix}adapter.{name}", tuple(f"{layer}.{hf}" for layer in layers), split, weight.layer)
            for name, hf, split in (
                ("down", DOWN, COLUMNS if splits_inputs else Replicated(len(layers))),
                ("up", UP, REPLICATED if splits_inputs else weight.split),
            )
        )

    def check(self, weights: Iterable[TensorMapping]) -> None:
        """Check that all layers with adapters are linear layers of Megatron's model, given the mappings of its weights.

        Raises:
            ValueError: a layer, such as the output head, does not support an adapter.
        """
        inside = {name for mapping in weights if mapping.layer is not None for name in mapping.hf_names}
        if other := [layer for layer in self.layers if f"{layer}.weight" not in inside]:
            raise ValueError(
                f"target_modules: {min(other)} would get an adapter, which Megatron holds in attention and MLP alone. "
                "Leave it out, or train with strategy=fsdp."
            )

    def with_zeros(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of adapters by name, with zeros for layers that have no adapter."""
        zeros = {}
        for layer in self.sizes.keys() - self.layers:
            outputs, inputs = self.sizes[layer]
            zeros[f"{layer}.{DOWN}"] = torch.zeros(1).expand(self.rank, inputs)
            zeros[f"{layer}.{UP}"] = torch.zeros(1).expand(outputs, self.rank)
        return zeros | dict(tensors)

    def renamed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield exported tensors under their names in the model with adapters, omitting layers without adapters."""
        for name, value in tensors:
            adapted = name.rpartition(".lora_")[0]
            layer, _, kind = name.rpartition(".")
            if not adapted or adapted in self.layers:
                yield f"{layer}.base_layer.{kind}" if layer in self.layers else name, value


class Adapter(nn.Module):
    """The adapters of one linear layer of Megatron, whose outputs are added to the layer's.

    Args:
        linear: the layer.
        adapters: rank and scale of the adapters.
        count: number of transformers layers that the layer fuses.
        owners: for each output of the layer on this rank, the index of its transformers layer.
    """

    def __init__(self, linear: Any, adapters: MegatronAdapters, count: int, owners: Tensor) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.down = nn.Parameter(linear.weight.new_empty(count * adapters.rank, inputs))
        self.up = nn.Parameter(linear.weight.new_empty(outputs, adapters.rank))
        self.scale, self.enabled = adapters.scale, True
        self._splits_inputs = isinstance(linear, RowParallelLinear)
        self._splits_tokens = bool(linear.sequence_parallel)
        self._own = F.one_hot(owners, count).to(linear.weight) if count > 1 else None
        # Each rank has the gradient of its tokens only, so Megatron must sum it over ranks, as for norms.
        replicated: Any = self.up if self._splits_inputs else self.down
        replicated.sequence_parallel = self._splits_tokens

    @property
    def split(self) -> nn.Parameter:
        """The parameter that is sharded over tensor-parallel ranks; the other one is replicated."""
        return self.down if self._splits_inputs else self.up

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the term to add to the layer's outputs, for inputs [N, 1, inputs]."""
        narrow = F.linear(inputs, self.down)
        if self._splits_inputs and self._splits_tokens:
            narrow = reduce_scatter_to_sequence_parallel_region(narrow)
        elif self._splits_inputs:
            narrow = reduce_from_tensor_model_parallel_region(narrow)
        elif self._splits_tokens:
            narrow = gather_from_sequence_parallel_region(narrow)
        else:
            narrow = copy_to_tensor_model_parallel_region(narrow)
        up = self.up if self._own is None else (self._own[:, :, None] * self.up[:, None]).flatten(1)
        return F.linear(narrow, up) * self.scale


def insert(chunk: Any, adapters: MegatronAdapters, mappings: Iterable[TensorMapping]) -> None:
    """Insert uninitialised adapters into the layers of a chunk of a frozen model.

    Args:
        chunk: the chunk.
        adapters: the layers that get adapters.
        mappings: mappings of the weights of the full model.
    """
    rank, ranks = groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()
    layers = {layer.layer_number - 1: layer for layer in chunk.decoder.layers}
    for mapping in mappings:
        if mapping.layer not in layers or not adapters.mappings(mapping):
            continue
        linear = layers[mapping.layer].get_submodule(mapping.name.removesuffix(".weight"))
        owners = {
            name: torch.full((adapters.sizes[name.removesuffix(".weight")][0], 1), index)
            for index, name in enumerate(mapping.hf_names)
        }
        of_rank = LoadedTensors(owners).read(mapping, rank, ranks) if len(owners) > 1 else owners[mapping.hf_names[0]]
        linear.adapter = Adapter(linear, adapters, len(owners), of_rank[:, 0])
        linear.register_forward_hook(_add)
    if chunk.pre_process:
        # The backward pass of a stage, and of a recomputed layer, needs an input that requires a gradient.
        chunk.embedding.register_forward_hook(lambda module, inputs, embedded: embedded.requires_grad_())


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters of a model inside the context, so that it computes the reference."""
    adapters = [module for module in model.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def _add(linear: Any, inputs: tuple[Tensor], outputs: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Add the outputs of a layer's adapter to those of the layer; a forward hook."""
    output, bias = outputs
    return (output + linear.adapter(inputs[0]) if linear.adapter.enabled else output), bias
