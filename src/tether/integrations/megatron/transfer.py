"""Loads weights into the ranks of a Megatron model and exports them, under transformers' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as groups
from torch import Tensor

from tether.integrations.megatron.adapters import MegatronAdapters
from tether.integrations.megatron.dist_checkpoint import DistCheckpoint
from tether.integrations.megatron.files import LoadedTensors, WeightFiles, WeightSource
from tether.integrations.megatron.layout import MegatronLayout, experts_of
from tether.integrations.megatron.mapping import TensorMapping, tensor_mappings
from tether.integrations.megatron.splits import Replicated

TensorKey = tuple[str, int | None, int | None]
"""Name, layer and expert of a `TensorMapping`; the expert's index is local to its rank."""
_HEAD: TensorKey = ("output_layer.weight", None, None)


@dataclass(frozen=True)
class Placed:
    """A model whose chunks are distributed over the ranks of a layout."""

    hf_config: Any
    layout: MegatronLayout
    role: str
    chunks: Sequence[Any]
    """The chunks on this rank."""
    adapters: MegatronAdapters | None = None

    @property
    def tied(self) -> bool:
        """Whether the output layer shares its weight with the embedding."""
        return self.role == "policy" and bool(self.hf_config.tie_word_embeddings)

    def weights(self) -> Iterator[TensorMapping]:
        """Yield the mappings of all tensors of the full model without adapters."""
        return tensor_mappings(self.hf_config, self.role)

    def mappings(self, *, trained: bool = False) -> Iterator[TensorMapping]:
        """Yield the mappings of all tensors of the full model, or of trained ones (adapters and a critic's head)."""
        for mapping in self.weights():
            if not (trained and self.adapters) or (self.role == "critic" and mapping.name.startswith("output_layer")):
                yield mapping
            if self.adapters:
                yield from self.adapters.mappings(mapping)


def load_weights(model: Placed, source: Path | DistCheckpoint | Mapping[str, Tensor], *, trained: bool = False) -> None:
    """Load this rank's slices, as `tether.integrations.megatron.model.MegatronModel.load` describes."""
    local = _local_tensors(model, buffers=not trained)
    with _open(source) as files, torch.no_grad():
        for mapping in model.mappings(trained=True) if trained else model.weights():
            expert_rank, key = _locate(model, mapping)
            is_local = key in local and expert_rank == _expert_rank(mapping)
            if is_local and not (mapping.optional and not files.has(mapping)):
                _fill(local[key], mapping, files)
            if model.tied and mapping.name.startswith("embedding") and _HEAD in local:
                _fill(local[_HEAD], mapping, files)  # the last stage has a copy of the embedding


def export_weights(model: Placed, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors on each rank, as `tether.integrations.megatron.model.MegatronModel.export` describes."""
    local = _local_tensors(model)
    owners = _owners(local)
    for mapping in model.mappings(trained=trained):
        expert_rank, key = _locate(model, mapping)
        if mapping.expert is not None and expert_rank > 0:
            continue  # exported together with the expert of the first rank
        owner, shape, dtype = owners[key]
        shard = local[key].detach().contiguous() if key in local else torch.empty(shape, dtype=dtype, device=_device())
        _broadcast(shard, owner, groups.get_pipeline_model_parallel_group())
        for number, expert_shard in enumerate(_gather_experts(shard, mapping)):
            tensors = mapping.split.join(_gather_shards(expert_shard, mapping))
            yield from zip(_names(model, mapping, number), tensors, strict=True)


def _local_tensors(model: Placed, *, buffers: bool = True) -> dict[TensorKey, Tensor]:
    """Return the parameters and buffers of this rank."""
    tensors: dict[TensorKey, Tensor] = {}
    for chunk in model.chunks:
        state: dict[str, Any] = {**dict(chunk.named_parameters()), **(dict(chunk.named_buffers()) if buffers else {})}
        for full_name, tensor in state.items():
            if not full_name.startswith("decoder.layers."):
                tensors[full_name, None, None] = tensor
                continue
            number, name = full_name.removeprefix("decoder.layers.").split(".", 1)
            layer, expert = chunk.decoder.layers[int(number)].layer_number - 1, None
            if name.startswith("mlp.experts.local_experts."):
                index, name = name.removeprefix("mlp.experts.local_experts.").split(".", 1)
                expert = int(index)
            tensors[name, layer, expert] = tensor
    return tensors


def _owners(local: dict[TensorKey, Tensor]) -> dict[TensorKey, tuple[int, torch.Size, torch.dtype]]:
    """Return for each tensor the first pipeline rank that has it, and the shape and dtype of a shard."""
    group = groups.get_pipeline_model_parallel_group()
    stages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(stages, {key: (tensor.shape, tensor.dtype) for key, tensor in local.items()}, group=group)
    return {key: (stage, *stages[stage][key]) for stage in reversed(range(len(stages))) for key in stages[stage]}


def _locate(model: Placed, mapping: TensorMapping) -> tuple[int, TensorKey]:
    """Return the expert-parallel rank that has a tensor (0 if it is not an expert's), and its key on that rank."""
    if mapping.expert is None:
        return 0, (mapping.name, mapping.layer, None)
    each = (experts_of(model.hf_config) or 0) // model.layout.expert
    return mapping.expert // each, (mapping.name, mapping.layer, mapping.expert % each)


def _expert_rank(mapping: TensorMapping) -> int:
    return 0 if mapping.expert is None else int(groups.get_expert_model_parallel_rank())


def _ranks(mapping: TensorMapping) -> tuple[int, int, Any]:
    """Return this rank, the size and the group of the ranks that split a tensor."""
    if mapping.expert is None:
        group = groups.get_tensor_model_parallel_group()
    else:
        group = groups.get_expert_tensor_parallel_group()
    return dist.get_rank(group), dist.get_world_size(group), group


def _open(source: Path | DistCheckpoint | Mapping[str, Tensor]) -> AbstractContextManager[WeightSource]:
    if isinstance(source, Path):
        return WeightFiles(source)
    return nullcontext(source if isinstance(source, DistCheckpoint) else LoadedTensors(source))


def _fill(tensor: Tensor, mapping: TensorMapping, files: WeightSource) -> None:
    rank, ranks, _ = _ranks(mapping)
    shard = files.read(mapping, rank, ranks)
    if shard.shape != tensor.shape:
        raise ValueError(
            f"{files.folder}: {' and '.join(mapping.hf_names)} give {tuple(shard.shape)} on this rank, and config.json "
            f"asks for {tuple(tensor.shape)}. The weights are of another model than the config."
        )
    tensor.copy_(shard)


def _broadcast(shard: Tensor, owner: int, group: Any) -> None:
    if dist.get_world_size(group) > 1:
        dist.broadcast(shard, dist.get_global_rank(group, owner), group=group)


def _gather_experts(shard: Tensor, mapping: TensorMapping) -> list[Tensor]:
    """Gather the experts with the same local index from the expert-parallel ranks, in order."""
    return [shard] if mapping.expert is None else _gather(shard, groups.get_expert_model_parallel_group())


def _gather_shards(shard: Tensor, mapping: TensorMapping) -> list[Tensor]:
    return [shard] if isinstance(mapping.split, Replicated) else _gather(shard, _ranks(mapping)[2])


def _gather(shard: Tensor, group: Any) -> list[Tensor]:
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(ranks)]
    dist.all_gather(shards, shard, group=group)
    return shards


def _names(model: Placed, mapping: TensorMapping, expert_rank: int) -> tuple[str, ...]:
    if mapping.expert is None or expert_rank == 0:
        return mapping.hf_names
    expert = mapping.expert + expert_rank * ((experts_of(model.hf_config) or 0) // model.layout.expert)
    return tuple(name.replace(f".experts.{mapping.expert}.", f".experts.{expert}.") for name in mapping.hf_names)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
