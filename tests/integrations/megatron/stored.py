"""Folders in Megatron's format torch_dist: written by Megatron itself on ranks, or here, of any tensors."""

from __future__ import annotations

import importlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from torch import Tensor
from transformers import PreTrainedModel

from tether.integrations.megatron import MegatronLayout, cpu, without_te
from tether.integrations.megatron.dist_checkpoint import DistCheckpoint
from tether.integrations.megatron.families import transformer_config
from tether.integrations.megatron.files import LoadedTensors
from tether.integrations.megatron.groups import start
from tether.integrations.megatron.mapping import tensor_mappings
from tether.integrations.megatron.model import Role, build
from tether.integrations.megatron.transfer import Placed, load_weights
from tether.text.learning.engines.ranks import gather_objects
from tether.text.models.fused_experts import Unfused
from tether.text.models.load import load_config

OF_TRANSFORMER_ENGINE = {
    "qwen2_moe": {"mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight"},
    "deepseek_v3": {
        "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    },
}
"""Names by Megatron's layers without it -> with it."""


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """A dense policy's weights by Megatron's names, its layers stacked."""
    weights, found = LoadedTensors(Unfused(model.state_dict())), defaultdict[str, list[Tensor]](list)
    for mapping in tensor_mappings(model.config, "policy"):
        found[mapping.name if mapping.layer is None else f"decoder.layers.{mapping.name}"].append(
            weights.read(mapping, 0, 1)
        )
    return {name: torch.stack(each) if name.startswith("decoder.layers.") else each[0] for name, each in found.items()}


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Write tensors, each whole; returns `folder`."""
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return folder


def write_by_megatron(layout: MegatronLayout, cases: list[tuple[Path, Path, dict[str, Any]]]) -> None:
    """On each rank: have Megatron save models of Hugging Face directories; see `_save`."""
    start(layout)
    for model, folder, options in cases:
        _save(layout, model, folder, **options)


def _save(
    layout: MegatronLayout,
    path: Path,
    folder: Path,
    *,
    role: Role = "policy",
    stacked: bool = False,
    padding: int = 0,
    fused_names: bool = False,
    whole: bool = True,
) -> None:
    """Save a model.

    Args:
        layout: of the ranks.
        path: directory of transformers.
        folder: to write.
        role: what stands on the backbone.
        stacked: also layers with experts are one tensor.
        padding: rows that are added to the vocabulary.
        fused_names: those that tensors have with Transformer Engine.
        whole: False: by our own model, where Megatron cannot build one without Transformer Engine.
    """
    hf_config = load_config(path)
    if whole:
        config = transformer_config(hf_config, layout, torch.float32, {})
        without_te.correct()
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        chunk = GPTModel(
            config, spec, hf_config.vocab_size, 64, position_embedding_type="rope",
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        )  # fmt: skip
        load_weights(Placed(hf_config, layout, role, [chunk]), path)
    else:
        model = build(hf_config, layout, role=role, dtype=torch.float32)
        model.load(path)
        (chunk,) = model.chunks
    if stacked:
        chunk.config.moe_layer_freq = 1
    state = chunk.sharded_state_dict()
    if padding:
        key = "embedding.word_embeddings.weight"
        rows = torch.nn.functional.pad(chunk.embedding.word_embeddings.weight.detach(), (0, 0, 0, padding), value=9.0)
        state[key] = ShardedTensor.from_rank_offsets(key, rows, replica_id=dist.get_rank())
    for name, other in OF_TRANSFORMER_ENGINE.get(hf_config.model_type, {}).items() if fused_names else ():
        for tensor in state.values():
            tensor.key = tensor.key.replace(name, other)
    moments = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg", torch.zeros(4), replica_id=dist.get_rank())
    state["moments"] = moments
    folder.mkdir(parents=True, exist_ok=True)
    importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")  # before what it loads is redirected
    cpu.install()
    with pytest.MonkeyPatch.context() as without_gpu:
        if not torch.cuda.is_available():  # which 0.19 asks all the same
            without_gpu.setattr(torch.cuda, "synchronize", lambda: None)
            without_gpu.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        dist_checkpointing.save(state, str(folder))


def unlike(layout: MegatronLayout, cases: dict[str, tuple[Path, Path, Role]]) -> dict[str, set[str]]:
    """Of each case the tensors of any rank that differ, read out of a directory of transformers and of Megatron."""
    start(layout)
    found = gather_objects({name: _unlike(layout, *case) for name, case in cases.items()})
    return {name: set().union(*(of_rank[name] for of_rank in found)) for name in cases}


def _unlike(layout: MegatronLayout, path: Path, folder: Path, role: Role) -> list[str]:
    hf_config, weights = load_config(path), []
    for source in (path, DistCheckpoint(folder, hf_config.vocab_size)):
        model = build(hf_config, layout, role=role, dtype=torch.float32)
        state = {f"{number}.{name}": x for number, chunk in enumerate(model.chunks) for name, x in _tensors(chunk)}
        for tensor in state.values():
            tensor.fill_(7.0)
        model.load(source)
        weights.append(state)
    one, other = weights
    assert len(one) > 5
    return [name for name in one if not torch.equal(one[name], other[name])]


def _tensors(chunk: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, x.detach()) for name, x in chunk.state_dict().items() if isinstance(x, Tensor))
