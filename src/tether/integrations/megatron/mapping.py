"""The mapping between Megatron's tensors and transformers' tensor names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tether.integrations.megatron.families import expert_layers, has_value_bias
from tether.integrations.megatron.layout import experts_of
from tether.integrations.megatron.splits import ColumnSplit, GateUp, QueryKeyValue, Replicated, RowSplit, Split

REPLICATED, ROWS, COLUMNS, GATE_UP = Replicated(), RowSplit(), ColumnSplit(), GateUp()


@dataclass(frozen=True)
class TensorMapping:
    """A tensor of Megatron, and the tensors of transformers that it contains."""

    name: str
    """Name relative to the expert if there is an `expert`, else to the `layer`, else to the chunk of the model."""
    hf_names: tuple[str, ...]
    split: Split
    layer: int | None = None
    """Index of the layer in the full model."""
    expert: int | None = None
    """Index of the expert in its layer."""
    optional: bool = False
    """Whether files may lack the tensor, which then stays unchanged."""


def tensor_mappings(hf_config: Any, role: str) -> Iterator[TensorMapping]:
    """Yield all tensors of a model, in the order of its layers."""
    yield TensorMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), ROWS)
    for layer, sparse in enumerate(expert_layers(hf_config)):
        prefix = f"model.layers.{layer}."
        entries = {**_norms(), **_attention(hf_config), **(_sparse(hf_config) if sparse else _dense("mlp", "mlp"))}
        for name, (hf_names, split) in entries.items():
            yield TensorMapping(name, tuple(prefix + hf_name for hf_name in hf_names), split, layer)
        for expert in range(experts_of(hf_config) or 0) if sparse else ():
            for name, (hf_names, split) in _dense("", f"mlp.experts.{expert}").items():
                yield TensorMapping(name, tuple(prefix + hf_name for hf_name in hf_names), split, layer, expert)
    yield TensorMapping("decoder.final_layernorm.weight", ("model.norm.weight",), REPLICATED)
    if role == "critic":
        yield TensorMapping("output_layer.weight", ("score.weight",), REPLICATED, optional=True)
        if has_value_bias(hf_config):
            yield TensorMapping("output_layer.bias", ("score.bias",), REPLICATED, optional=True)
    elif not hf_config.tie_word_embeddings:
        yield TensorMapping("output_layer.weight", ("lm_head.weight",), ROWS)


Entries = dict[str, tuple[tuple[str, ...], Split]]


def _norms() -> Entries:
    return {
        "input_layernorm.weight": (("input_layernorm.weight",), REPLICATED),
        "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), REPLICATED),
    }


def _attention(hf_config: Any) -> Entries:
    if getattr(hf_config, "kv_lora_rank", None):
        return _latent_attention(hf_config)
    heads = hf_config.num_attention_heads
    split = QueryKeyValue(heads, hf_config.num_key_value_heads or heads)
    entries: Entries = {
        "self_attention.linear_qkv.weight": (tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), split),
        "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), COLUMNS),
    }
    if hf_config.model_type in ("qwen2", "qwen2_moe") and getattr(hf_config, "qkv_bias", True):
        entries["self_attention.linear_qkv.bias"] = (tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), split)
    if hf_config.model_type in ("qwen3", "qwen3_moe"):
        for x in "qk":
            entries[f"self_attention.{x}_layernorm.weight"] = ((f"self_attn.{x}_norm.weight",), REPLICATED)
    return entries


def _latent_attention(hf_config: Any) -> Entries:
    query: Entries = {"linear_q_proj": (("q_proj",), ROWS)}
    if hf_config.q_lora_rank:
        query = {
            "linear_q_down_proj": (("q_a_proj",), ROWS),
            "q_layernorm": (("q_a_layernorm",), REPLICATED),
            "linear_q_up_proj": (("q_b_proj",), ROWS),
        }
    entries: Entries = {
        **query,
        "linear_kv_down_proj": (("kv_a_proj_with_mqa",), REPLICATED),
        "kv_layernorm": (("kv_a_layernorm",), REPLICATED),
        "linear_kv_up_proj": (("kv_b_proj",), ROWS),
        "linear_proj": (("o_proj",), COLUMNS),
    }
    return {
        f"self_attention.{name}.weight": ((f"self_attn.{hf_name}.weight",), split)
        for name, ((hf_name,), split) in entries.items()
    }


def _dense(name: str, hf_name: str) -> Entries:
    prefix = f"{name}." if name else ""
    return {
        f"{prefix}linear_fc1.weight": ((f"{hf_name}.gate_proj.weight", f"{hf_name}.up_proj.weight"), GATE_UP),
        f"{prefix}linear_fc2.weight": ((f"{hf_name}.down_proj.weight",), COLUMNS),
    }


def _sparse(hf_config: Any) -> Entries:
    """Return the weights of a layer with experts, except those of the experts."""
    entries: Entries = {"mlp.router.weight": (("mlp.gate.weight",), REPLICATED)}
    if hf_config.model_type == "qwen2_moe":
        entries |= _dense("mlp.shared_experts", "mlp.shared_expert")
        entries["mlp.shared_experts.gate_weight"] = (("mlp.shared_expert_gate.weight",), REPLICATED)
    if hf_config.model_type == "deepseek_v3":
        entries["mlp.router.expert_bias"] = (("mlp.gate.e_score_correction_bias",), REPLICATED)
        entries |= _dense("mlp.shared_experts", "mlp.shared_experts") if hf_config.n_shared_experts else {}
    return entries
