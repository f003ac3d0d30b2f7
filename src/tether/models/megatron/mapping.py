"""Megatron's names of a model's tensors, and the names that transformers saves them under."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tether.models.megatron.families import expert_layers
from tether.models.megatron.layout import experts_of
from tether.models.megatron.splits import Columns, GateUp, QueryKeyValue, Rows, Split, Whole

WHOLE, ROWS, COLUMNS, GATE_UP = Whole(), Rows(), Columns(), GateUp()


@dataclass(frozen=True)
class Held:
    """A tensor of Megatron, and those of transformers that it holds."""

    name: str
    """In its chunk of the model, or with a `layer` in that layer, or with an `expert` in that expert."""
    hf_names: tuple[str, ...]
    split: Split
    layer: int | None = None
    """Counted over the whole model."""
    expert: int | None = None
    """Counted over the whole layer."""
    optional: bool = False
    """Stays as it is where the files lack it."""


def held_tensors(hf_config: Any, role: str, value_bias: bool) -> Iterator[Held]:
    """All tensors of a model, in the order of its layers."""
    yield Held("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), ROWS)
    for layer, sparse in enumerate(expert_layers(hf_config)):
        prefix = f"model.layers.{layer}."
        pieces = {**_norms(), **_attention(hf_config), **(_sparse(hf_config) if sparse else _dense("mlp", "mlp"))}
        for name, (hf_names, split) in pieces.items():
            yield Held(name, tuple(prefix + hf_name for hf_name in hf_names), split, layer)
        for expert in range(experts_of(hf_config) or 0) if sparse else ():
            for name, (hf_names, split) in _dense("", f"mlp.experts.{expert}").items():
                yield Held(name, tuple(prefix + hf_name for hf_name in hf_names), split, layer, expert)
    yield Held("decoder.final_layernorm.weight", ("model.norm.weight",), WHOLE)
    if role == "critic":
        yield Held("output_layer.weight", ("score.weight",), WHOLE, optional=True)
        if value_bias:
            yield Held("output_layer.bias", ("score.bias",), WHOLE, optional=True)
    elif not hf_config.tie_word_embeddings:
        yield Held("output_layer.weight", ("lm_head.weight",), ROWS)


Pieces = dict[str, tuple[tuple[str, ...], Split]]


def _norms() -> Pieces:
    return {
        "input_layernorm.weight": (("input_layernorm.weight",), WHOLE),
        "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), WHOLE),
    }


def _attention(hf_config: Any) -> Pieces:
    if getattr(hf_config, "kv_lora_rank", None):
        return _latent_attention(hf_config)
    heads = hf_config.num_attention_heads
    split = QueryKeyValue(heads, hf_config.num_key_value_heads or heads)
    found: Pieces = {
        "self_attention.linear_qkv.weight": (tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), split),
        "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), COLUMNS),
    }
    if hf_config.model_type in ("qwen2", "qwen2_moe") and getattr(hf_config, "qkv_bias", True):
        found["self_attention.linear_qkv.bias"] = (tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), split)
    if hf_config.model_type in ("qwen3", "qwen3_moe"):
        for x in "qk":
            found[f"self_attention.{x}_layernorm.weight"] = ((f"self_attn.{x}_norm.weight",), WHOLE)
    return found


def _latent_attention(hf_config: Any) -> Pieces:
    query: Pieces = {"linear_q_proj": (("q_proj",), ROWS)}
    if hf_config.q_lora_rank:
        query = {
            "linear_q_down_proj": (("q_a_proj",), ROWS),
            "q_layernorm": (("q_a_layernorm",), WHOLE),
            "linear_q_up_proj": (("q_b_proj",), ROWS),
        }
    pieces: Pieces = {
        **query,
        "linear_kv_down_proj": (("kv_a_proj_with_mqa",), WHOLE),
        "kv_layernorm": (("kv_a_layernorm",), WHOLE),
        "linear_kv_up_proj": (("kv_b_proj",), ROWS),
        "linear_proj": (("o_proj",), COLUMNS),
    }
    return {
        f"self_attention.{name}.weight": ((f"self_attn.{hf_name}.weight",), split)
        for name, ((hf_name,), split) in pieces.items()
    }


def _dense(name: str, hf_name: str) -> Pieces:
    prefix = f"{name}." if name else ""
    return {
        f"{prefix}linear_fc1.weight": ((f"{hf_name}.gate_proj.weight", f"{hf_name}.up_proj.weight"), GATE_UP),
        f"{prefix}linear_fc2.weight": ((f"{hf_name}.down_proj.weight",), COLUMNS),
    }


def _sparse(hf_config: Any) -> Pieces:
    """Weights of a layer with experts besides those of the experts."""
    found: Pieces = {"mlp.router.weight": (("mlp.gate.weight",), WHOLE)}
    if hf_config.model_type == "qwen2_moe":
        found |= _dense("mlp.shared_experts", "mlp.shared_expert")
        found["mlp.shared_experts.gate_weight"] = (("mlp.shared_expert_gate.weight",), WHOLE)
    if hf_config.model_type == "deepseek_v3":
        found["mlp.router.expert_bias"] = (("mlp.gate.e_score_correction_bias",), WHOLE)
        found |= _dense("mlp.shared_experts", "mlp.shared_experts") if hf_config.n_shared_experts else {}
    return found
