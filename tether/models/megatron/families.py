"""Which models of transformers Megatron can hold, and their configs in Megatron's terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from tether.models.megatron.attention import AttentionOptions, head_size, rotary_of
from tether.models.megatron.layout import Layout, experts_of
from tether.spelling import did_you_mean

SET_ELSEWHERE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
    "params_dtype", "pipeline_dtype", "bf16", "fp16", "num_layers", "hidden_size", "num_attention_heads",
    "num_query_groups", "ffn_hidden_size", "kv_channels", "num_moe_experts", "transformer_impl",
    "pipeline_model_parallel_layout", "moe_grouped_gemm", "hidden_dropout", "attention_dropout",
)  # fmt: skip
"""Entries of Megatron's config that the model, the layout or the way tether runs it decide."""


def check_family(hf_config: Any) -> None:
    """Refuse a model that has no mapping, or that uses what Megatron has no place for.

    Raises:
        ValueError: names the class and those that have a mapping, or the entry of its config.
    """
    name = (getattr(hf_config, "architectures", None) or [type(hf_config).__name__])[0]
    if hf_config.model_type not in FAMILIES:
        raise ValueError(
            f"{name}: has no mapping to Megatron. Those that have one: {', '.join(FAMILIES)} (config.json's "
            "model_type). Train it with strategy=fsdp."
        )
    rope = hf_config.rope_parameters["rope_type"]
    biases = [(entry, getattr(hf_config, entry, False)) for entry in ("attention_bias", "mlp_bias")]
    for entry, value, refused in (
        ("hidden_act", hf_config.hidden_act, hf_config.hidden_act != "silu"),
        ("rope_type", rope, rope in ("dynamic", "longrope")),  # their angles depend on the length of a sequence
        *((entry, bias, bias) for entry, bias in biases),
    ):
        if refused:
            raise ValueError(f"{name}: {entry}={value!r} has no place in Megatron. Train it with strategy=fsdp.")


def transformer_config(
    hf_config: Any, layout: Layout, dtype: torch.dtype, overrides: Mapping[str, object]
) -> TransformerConfig:
    """The config of a model in Megatron's terms.

    Args:
        hf_config: of a family that `check_family` admits.
        layout: that `tether.models.megatron.layout.check` admits.
        dtype: of weights and of what travels between the stages.
        overrides: entries of Megatron's config, as ``override_transformer_config`` has them.

    Raises:
        ValueError: an entry to override that does not exist, or that is set elsewhere.
    """
    latent = bool(getattr(hf_config, "kv_lora_rank", None))
    kind = MLATransformerConfig if latent else TransformerConfig
    _check_overrides(overrides, {field.name for field in fields(kind)})
    entries = {
        **_common(hf_config, layout, dtype),
        **FAMILIES[hf_config.model_type](hf_config),
        **(_experts(hf_config) if experts_of(hf_config) else {}),
        **overrides,
    }
    if overrides.get("moe_aux_loss_coeff") and "moe_router_load_balancing_type" not in overrides:
        entries["moe_router_load_balancing_type"] = "aux_loss"
    config = kind(**entries)
    config.tether_attention = _attention_options(hf_config)
    return config


def expert_layers(hf_config: Any) -> list[bool]:
    """Of each layer whether its MLP is a mixture of experts."""
    layers = range(hf_config.num_hidden_layers)
    if not experts_of(hf_config):
        return [False for _ in layers]
    if hf_config.model_type == "deepseek_v3":
        return [layer >= hf_config.first_k_dense_replace for layer in layers]
    step, dense = hf_config.decoder_sparse_step, hf_config.mlp_only_layers or []
    return [layer not in dense and (layer + 1) % step == 0 for layer in layers]


def has_value_bias(hf_config: Any) -> bool:
    """Whether the scalar head has a bias, as in transformers those of token classifiers have."""
    return not (getattr(hf_config, "architectures", None) or [""])[0].endswith("ForSequenceClassification")


def _common(hf_config: Any, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads or hf_config.num_attention_heads,
        "ffn_hidden_size": hf_config.intermediate_size,
        "kv_channels": head_size(hf_config),
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.splits_tokens,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,  # weights are loaded
        "moe_token_dispatcher_type": "alltoall",  # any other refuses variable lengths, also where nothing is dispatched
        "variable_seq_lengths": True,  # micro-batches are packed, each to a length of its own
        "batch_p2p_comm": torch.cuda.is_available(),
        "deallocate_pipeline_outputs": torch.cuda.is_available(),
        # Megatron's fused operations need apex or Transformer Engine.
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "transformer_impl": "local",
        "attention_softmax_in_fp32": True,
    }


def _experts(hf_config: Any) -> dict[str, Any]:
    return {
        "num_moe_experts": experts_of(hf_config),
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_layer_freq": [int(sparse) for sparse in expert_layers(hf_config)],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
    }


def _dense(hf_config: Any) -> dict[str, Any]:
    return {}


def _qwen2(hf_config: Any) -> dict[str, Any]:
    return {"add_qkv_bias": getattr(hf_config, "qkv_bias", True)}


def _qwen3(hf_config: Any) -> dict[str, Any]:
    return {"qk_layernorm": True}


FAMILIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": _dense,
    "mistral": _dense,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
"""transformers' model_type -> what its family adds to Megatron's config."""


def _attention_options(hf_config: Any) -> AttentionOptions:
    window, kinds = getattr(hf_config, "sliding_window", None), getattr(hf_config, "layer_types", None)
    layers = range(hf_config.num_hidden_layers)
    slides = [kinds is None or kinds[layer] == "sliding_attention" for layer in layers]
    return AttentionOptions(tuple(window if slide else None for slide in slides), rotary_of(hf_config)[1])


def _check_overrides(overrides: Mapping[str, object], known: set[str]) -> None:
    for key, value in overrides.items():
        if key not in known:
            raise ValueError(
                f"override_transformer_config.{key}={value!r}: Megatron's config has no {key}."
                f"{did_you_mean(key, known)}"
            )
        if key in SET_ELSEWHERE:
            raise ValueError(
                f"override_transformer_config.{key}={value!r}: follows from the model, the parallel sizes and the "
                "engine's options. Leave it out, and set those."
            )
