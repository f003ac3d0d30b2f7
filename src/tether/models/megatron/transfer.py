"""Weights into and out of the ranks of a Megatron model, by the names of transformers."""

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

from tether.models.megatron.dist_checkpoint import DistCheckpoint
from tether.models.megatron.families import has_value_bias
from tether.models.megatron.files import GivenTensors, Source, WeightFiles
from tether.models.megatron.layout import Layout, experts_of
from tether.models.megatron.mapping import Held, held_tensors
from tether.models.megatron.splits import Whole

Place = tuple[str, int | None, int | None]
"""Name, layer and expert of a `Held`; experts counted on their rank."""
_HEAD: Place = ("output_layer.weight", None, None)


@dataclass(frozen=True)
class Placed:
    """A model on the ranks of a layout."""

    hf_config: Any
    layout: Layout
    role: str
    chunks: Sequence[Any]
    """Of this rank."""

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.role == "policy" and bool(self.hf_config.tie_word_embeddings)

    def held(self) -> Iterator[Held]:
        """The tensors of the whole model."""
        return held_tensors(self.hf_config, self.role, has_value_bias(self.hf_config))


def load_weights(model: Placed, source: Path | DistCheckpoint | Mapping[str, Tensor], *, buffers: bool = True) -> None:
    """Read this rank's slices; see `tether.models.megatron.model.MegatronModel.load`."""
    here = _tensors_here(model, buffers=buffers)
    with _opened(source) as files, torch.no_grad():
        for held in model.held():
            expert_rank, place = _place(model, held)
            is_here = place in here and expert_rank == _expert_rank(held)
            if is_here and not (held.optional and not files.has(held)):
                _fill(here[place], held, files)
            if model.tied and held.name.startswith("embedding") and _HEAD in here:
                _fill(here[_HEAD], held, files)  # the last stage has a copy


def export_weights(model: Placed) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors on each rank; see `tether.models.megatron.model.MegatronModel.export`."""
    here = _tensors_here(model)
    owners = _owners(here)
    for held in model.held():
        expert_rank, place = _place(model, held)
        if held.expert is not None and expert_rank > 0:
            continue  # went along with the expert of the first rank
        owner, shape, dtype = owners[place]
        part = here[place].detach().contiguous() if place in here else torch.empty(shape, dtype=dtype, device=_device())
        _broadcast(part, owner, groups.get_pipeline_model_parallel_group())
        for number, expert_part in enumerate(_of_all_experts(part, held)):
            tensors = held.split.join(_parts(expert_part, held))
            yield from zip(_names(model, held, number), tensors, strict=True)


def _tensors_here(model: Placed, *, buffers: bool = True) -> dict[Place, Tensor]:
    """Parameters and buffers of this rank."""
    found: dict[Place, Tensor] = {}
    for chunk in model.chunks:
        state: dict[str, Any] = {**dict(chunk.named_parameters()), **(dict(chunk.named_buffers()) if buffers else {})}
        for full_name, tensor in state.items():
            if not full_name.startswith("decoder.layers."):
                found[full_name, None, None] = tensor
                continue
            number, name = full_name.removeprefix("decoder.layers.").split(".", 1)
            layer, expert = chunk.decoder.layers[int(number)].layer_number - 1, None
            if name.startswith("mlp.experts.local_experts."):
                index, name = name.removeprefix("mlp.experts.local_experts.").split(".", 1)
                expert = int(index)
            found[name, layer, expert] = tensor
    return found


def _owners(here: dict[Place, Tensor]) -> dict[Place, tuple[int, torch.Size, torch.dtype]]:
    """Of each tensor the first pipeline rank that holds it, with shape and dtype of a part."""
    group = groups.get_pipeline_model_parallel_group()
    stages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(stages, {place: (tensor.shape, tensor.dtype) for place, tensor in here.items()}, group=group)
    return {place: (stage, *stages[stage][place]) for stage in reversed(range(len(stages))) for place in stages[stage]}


def _place(model: Placed, held: Held) -> tuple[int, Place]:
    """The expert-parallel rank that has it (0 for what is no expert), and where it is there."""
    if held.expert is None:
        return 0, (held.name, held.layer, None)
    each = (experts_of(model.hf_config) or 0) // model.layout.expert
    return held.expert // each, (held.name, held.layer, held.expert % each)


def _expert_rank(held: Held) -> int:
    return 0 if held.expert is None else int(groups.get_expert_model_parallel_rank())


def _ranks(held: Held) -> tuple[int, int, Any]:
    """This rank, how many there are, and the group, that share a tensor."""
    if held.expert is None:
        group = groups.get_tensor_model_parallel_group()
    else:
        group = groups.get_expert_tensor_parallel_group()
    return dist.get_rank(group), dist.get_world_size(group), group


def _opened(source: Path | DistCheckpoint | Mapping[str, Tensor]) -> AbstractContextManager[Source]:
    if isinstance(source, Path):
        return WeightFiles(source)
    return nullcontext(source if isinstance(source, DistCheckpoint) else GivenTensors(source))


def _fill(tensor: Tensor, held: Held, files: Source) -> None:
    rank, ranks, _ = _ranks(held)
    part = files.read(held, rank, ranks)
    if part.shape != tensor.shape:
        raise ValueError(
            f"{files.folder}: {' and '.join(held.hf_names)} give {tuple(part.shape)} on this rank, and config.json "
            f"asks for {tuple(tensor.shape)}. The weights are of another model than the config."
        )
    tensor.copy_(part)


def _broadcast(part: Tensor, owner: int, group: Any) -> None:
    if dist.get_world_size(group) > 1:
        dist.broadcast(part, dist.get_global_rank(group, owner), group=group)


def _of_all_experts(part: Tensor, held: Held) -> list[Tensor]:
    """Of the experts that have the same place on the expert-parallel ranks, in their order."""
    return [part] if held.expert is None else _gathered(part, groups.get_expert_model_parallel_group())


def _parts(part: Tensor, held: Held) -> list[Tensor]:
    return [part] if isinstance(held.split, Whole) else _gathered(part, _ranks(held)[2])


def _gathered(part: Tensor, group: Any) -> list[Tensor]:
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return [part]
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part, group=group)
    return parts


def _names(model: Placed, held: Held, expert_rank: int) -> tuple[str, ...]:
    if held.expert is None or expert_rank == 0:
        return held.hf_names
    expert = held.expert + expert_rank * ((experts_of(model.hf_config) or 0) // model.layout.expert)
    return tuple(name.replace(f".experts.{held.expert}.", f".experts.{expert}.") for name in held.hf_names)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
