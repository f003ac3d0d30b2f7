"""The transformers models that are supported with Megatron, and the conversion of their configs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from tether.integrations.megatron.attention import AttentionOptions, head_size, rotary_of
from tether.integrations.megatron.layout import MegatronLayout, experts_of, shared_expert_width
from tether.spelling import did_you_mean

SET_ELSEWHERE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
    "params_dtype", "pipeline_dtype", "bf16", "fp16", "num_layers", "hidden_size", "num_attention_heads",
    "num_query_groups", "ffn_hidden_size", "kv_channels", "num_moe_experts", "transformer_impl",
    "pipeline_model_parallel_layout", "moe_grouped_gemm", "hidden_dropout", "attention_dropout",
)  # fmt: skip
"""Entries of Megatron's config that follow from the model, the layout or tether's use of it."""
UNFIT = {
    "moe_input_jitter_eps": "adds noise that no seed of the run draws",
    "moe_expert_capacity_factor": "drops tokens, by what else is in their micro-batch",
    "moe_router_load_balancing_type": "sinkhorn chooses experts by what else is in the micro-batch",
}
"""Entries that make gradients depend on chance or on micro-batches; the last one only with sinkhorn."""
_FLAG, _COUNT, _NUMBERS, _NAMES = "true or false", "a whole number above 0", "a number or a list of them", "a list"
ADJUSTABLE: dict[str, str | tuple[str, ...]] = {
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "recompute_num_layers": _COUNT,
    "recompute_modules": _NAMES,
    "distribute_saved_activations": _FLAG,
    "moe_aux_loss_coeff": _NUMBERS,
    "moe_z_loss_coeff": _NUMBERS,
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_router_dtype": ("fp32", "fp64"),
    "moe_token_dispatcher_type": ("alltoall", "flex", "allgather"),
    "moe_flex_dispatcher_backend": ("deepep", "hybridep"),
    "moe_deepep_num_sms": _COUNT,
    "moe_hybridep_num_sms": _COUNT,
    "microbatch_group_size_per_vp_stage": _COUNT,
    **dict.fromkeys(
        (
            "moe_enable_deepep", "moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap",
            "moe_per_layer_logging", "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion",
            "masked_softmax_fusion", "cross_entropy_loss_fusion", "persist_layer_norm", "memory_efficient_layer_norm",
            "attention_softmax_in_fp32", "disable_bf16_reduced_precision_matmul", "deterministic_mode",
            "batch_invariant_mode", "deallocate_pipeline_outputs",
        ),
        _FLAG,
    ),
}  # fmt: skip
"""Entries that affect memory, speed and rounding, or the losses of routers, with their type or choices (one of them, or
a list). Other entries change what the model computes, or are untested."""


def check_family(hf_config: Any) -> None:
    """Refuse a model without a mapping, or with features that Megatron does not support.

    Raises:
        ValueError: the message names the class and the supported ones, or the entry of its config.
    """
    name = (getattr(hf_config, "architectures", None) or [type(hf_config).__name__])[0]
    if hf_config.model_type not in FAMILIES:
        raise ValueError(
            f"{name}: has no mapping to Megatron. Supported: {', '.join(FAMILIES)} (config.json's "
            "model_type). Train it with strategy=fsdp."
        )
    rope = hf_config.rope_parameters["rope_type"]
    biases = [(entry, getattr(hf_config, entry, False)) for entry in ("attention_bias", "mlp_bias")]
    for entry, value, refused in (
        ("hidden_act", hf_config.hidden_act, hf_config.hidden_act != "silu"),
        ("rope_type", rope, rope in ("dynamic", "longrope")),  # their angles depend on the sequence length
        *((entry, bias, bias) for entry, bias in biases),
        *(_deepseek_refusals(hf_config) if hf_config.model_type == "deepseek_v3" else ()),
    ):
        if refused:
            raise ValueError(f"{name}: {entry}={value!r} is not supported by Megatron. Train it with strategy=fsdp.")


def transformer_config(
    hf_config: Any, layout: MegatronLayout, dtype: torch.dtype, overrides: Mapping[str, object]
) -> TransformerConfig:
    """Return Megatron's config for a model.

    Args:
        hf_config: config of a family that `check_family` accepts.
        layout: layout that `tether.integrations.megatron.layout.check` accepts.
        dtype: dtype of weights and of activations between the stages.
        overrides: entries of Megatron's config from ``override_transformer_config``.

    Raises:
        ValueError: an entry to override does not exist, is set elsewhere, changes what the model computes, has an
            invalid value, or conflicts with the layout.
    """
    latent = bool(getattr(hf_config, "kv_lora_rank", None))
    kind = MLATransformerConfig if latent else TransformerConfig
    model_entries = {
        **_common(hf_config, layout, dtype),
        **(_experts(hf_config, dtype) if experts_of(hf_config) else {}),
        **FAMILIES[hf_config.model_type](hf_config),
    }
    _check_overrides(overrides, {field.name: model_entries.get(field.name, field.default) for field in fields(kind)})
    entries = model_entries | dict(overrides)
    if overrides.get("moe_aux_loss_coeff") and "moe_router_load_balancing_type" not in overrides:
        entries["moe_router_load_balancing_type"] = "aux_loss"
    config = kind(**entries)
    config.tether_attention = _attention_options(hf_config)
    return config


def expert_layers(hf_config: Any) -> list[bool]:
    """Return for each layer whether its MLP is a mixture of experts."""
    layers = range(hf_config.num_hidden_layers)
    if not experts_of(hf_config):
        return [False for _ in layers]
    if hf_config.model_type == "deepseek_v3":
        return [layer >= hf_config.first_k_dense_replace for layer in layers]
    step, dense = hf_config.decoder_sparse_step, hf_config.mlp_only_layers or []
    return [layer not in dense and (layer + 1) % step == 0 for layer in layers]


def _deepseek_refusals(hf_config: Any) -> Iterator[tuple[str, object, bool]]:
    """Yield entries of the config with their values, and whether they are unsupported by Megatron."""
    yield "rope_interleave", hf_config.rope_interleave, not hf_config.rope_interleave
    normed = bool(hf_config.norm_topk_prob)
    yield "norm_topk_prob", normed, not normed
    top_k, groups = hf_config.num_experts_per_tok, hf_config.topk_group
    yield "num_experts_per_tok", top_k, top_k < 2  # Megatron does not normalise the weight of a single expert
    # Megatron scores a group by as many experts as are chosen from it, transformers by its best two.
    yield "topk_group", groups, hf_config.n_group > 1 and top_k // groups != 2


def has_value_bias(hf_config: Any) -> bool:
    """Return whether the scalar head has a bias, as transformers' token classifiers do."""
    return not (getattr(hf_config, "architectures", None) or [""])[0].endswith("ForSequenceClassification")


def _common(hf_config: Any, layout: MegatronLayout, dtype: torch.dtype) -> dict[str, Any]:
    interleaved = layout.virtual_pipeline is not None
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
        "moe_token_dispatcher_type": "alltoall",  # others refuse variable lengths, even if nothing is dispatched
        "variable_seq_lengths": True,  # micro-batches are packed to different lengths
        # With two stages, the next and the previous one are the same rank, and Megatron confuses both directions of an
        # exchange. With interleaved stages, each direction has its own exchange.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": torch.cuda.is_available() and not interleaved,
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


def _experts(hf_config: Any, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "num_moe_experts": experts_of(hf_config),
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_layer_freq": [int(sparse) for sparse in expert_layers(hf_config)],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": shared_expert_width(hf_config),
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        "moe_grouped_gemm": False,
    }


def _dense(hf_config: Any) -> dict[str, Any]:
    return {}


def _qwen2(hf_config: Any) -> dict[str, Any]:
    return {"add_qkv_bias": getattr(hf_config, "qkv_bias", True)}


def _qwen3(hf_config: Any) -> dict[str, Any]:
    return {"qk_layernorm": True}


def _qwen2_moe(hf_config: Any) -> dict[str, Any]:
    return {**_qwen2(hf_config), **_softmax_router(hf_config), "moe_shared_expert_gate": True}


def _qwen3_moe(hf_config: Any) -> dict[str, Any]:
    return {**_qwen3(hf_config), **_softmax_router(hf_config)}


def _softmax_router(hf_config: Any) -> dict[str, Any]:
    """Return the router options. A softmax over the chosen experts equals a renormalised softmax over all experts."""
    return {"moe_router_pre_softmax": not hf_config.norm_topk_prob}


def _deepseek_v3(hf_config: Any) -> dict[str, Any]:
    rope, grouped = hf_config.rope_parameters, hf_config.n_group > 1
    return {
        "multi_latent_attention": True,
        "num_query_groups": hf_config.num_attention_heads,
        "q_lora_rank": hf_config.q_lora_rank,
        "kv_lora_rank": hf_config.kv_lora_rank,
        "qk_head_dim": hf_config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
        "v_head_dim": hf_config.v_head_dim,
        "rope_type": "rope" if rope["rope_type"] == "default" else "yarn",
        "rotary_scaling_factor": rope.get("factor", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # constant, as in transformers
        "moe_router_topk_scaling_factor": hf_config.routed_scaling_factor,
        "moe_router_num_groups": hf_config.n_group if grouped else None,
        "moe_router_group_topk": hf_config.topk_group if grouped else None,
    }


FAMILIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": _dense,
    "mistral": _dense,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
}
"""transformers' model_type -> function that returns the additional entries of Megatron's config."""


def _attention_options(hf_config: Any) -> AttentionOptions:
    window, kinds = getattr(hf_config, "sliding_window", None), getattr(hf_config, "layer_types", None)
    layers = range(hf_config.num_hidden_layers)
    slides = [kinds is None or kinds[layer] == "sliding_attention" for layer in layers]
    return AttentionOptions(tuple(window if slide else None for slide in slides), rotary_of(hf_config)[1])


def _check_overrides(overrides: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Refuse invalid overrides of a config with these default values."""
    for key, value in overrides.items():
        if key not in defaults:
            raise ValueError(
                f"override_transformer_config.{key}={value!r}: Megatron's config has no {key}."
                f"{did_you_mean(key, defaults)}"
            )
        if key in SET_ELSEWHERE:
            raise ValueError(
                f"override_transformer_config.{key}={value!r}: follows from the model, the parallel sizes and the "
                "engine's options. Leave it out, and set those."
            )
        if key in UNFIT and value and (key != "moe_router_load_balancing_type" or "sinkhorn" in str(value)):
            raise ValueError(f"override_transformer_config.{key}={value!r}: {UNFIT[key]}. Leave it out.")
        allowed = ADJUSTABLE.get(key)
        if allowed is None and key not in UNFIT and value != defaults[key]:
            raise ValueError(
                f"override_transformer_config.{key}={value!r}: changes what the model computes, or was never tested; "
                f"it is {defaults[key]!r} here. Leave it out. "
                f"Those that can be changed: {', '.join(sorted(ADJUSTABLE))}."
            )
        if allowed is not None and not _is_allowed(value, allowed):
            description = allowed if isinstance(allowed, str) else f"one of {', '.join(allowed)}"
            raise ValueError(
                f"override_transformer_config.{key}={value!r}: is not {description}. Correct it, or leave it out."
            )


def _is_allowed(value: object, allowed: str | tuple[str, ...]) -> bool:
    if value is None or isinstance(allowed, tuple):
        return value is None or all(item in allowed for item in (value if isinstance(value, list) else [value]))
    numbers = value if isinstance(value, list) else [value]
    return {
        _FLAG: isinstance(value, bool),
        _COUNT: type(value) is int and value > 0,
        _NUMBERS: all(type(number) in (int, float) for number in numbers),
        _NAMES: isinstance(value, list),
    }[allowed]
