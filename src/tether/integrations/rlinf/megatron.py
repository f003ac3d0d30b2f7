"""Rows of a text run's model: its shape, and the keys that RLinf passes on to Megatron-core's configuration."""

from __future__ import annotations

from tether.integrations.rlinf.rows import (
    UNSET,
    Convert,
    NoEffect,
    NotRead,
    Refused,
    Table,
    Unsupported,
    Values,
    to,
)

ITS_OWN = NoEffect("the model's own config.json says so")
MEGATRON = NoEffect("tether sets up Megatron by itself")
WEIGHTS = NoEffect("weights are those of the model's folder, so none are drawn")
LENGTHS = NoEffect("lengths follow from runner.seq_length")
OFF = (False, None)
ZERO = (0, 0.0, None)
SHAPE = (
    "activation", "add_bias_linear", "add_position_embedding", "add_qkv_bias", "ffn_hidden_size", "head_dim",
    "hidden_size", "kv_channels", "layernorm_epsilon", "layernorm_zero_centered_gamma", "max_position_embeddings",
    "moe_ffn_hidden_size", "moe_router_pre_softmax", "moe_router_topk", "multi_latent_attention", "normalization",
    "num_attention_heads", "num_experts", "num_layers", "num_moe_experts", "num_query_groups", "openai_gelu",
    "padded_vocab_size", "position_embedding_type", "qk_layernorm", "rotary_base", "rotary_interleaved",
    "rotary_percentage", "seq_len_interpolation_factor", "share_embeddings_and_output_weights",
)  # fmt: skip
LAYERS = (
    "apply_query_key_layer_scaling", "apply_rope_fusion", "attention_softmax_in_fp32", "autocast_dtype",
    "batch_p2p_comm", "bias_activation_fusion", "bias_dropout_fusion", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "enable_cuda_graph", "gradient_accumulation_fusion",
    "make_vocab_size_divisible_by", "masked_softmax_fusion", "moe_enable_deepep", "moe_grouped_gemm",
    "moe_permute_fusion", "moe_shared_expert_overlap", "moe_token_dispatcher_type",
    "num_microbatches_with_partial_activation_checkpoints", "persist_layer_norm", "pipeline_dtype",
    "pipeline_model_parallel_split_rank", "recompute_*", "tp_comm_bootstrap_backend", "tp_comm_overlap",
    "tp_only_amax_red", "use_cpu_initialization", "use_te_rng_tracker", "variable_seq_lengths",
)  # fmt: skip


BALANCE, OF_LOGITS, KIND = "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type"
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def losses_of_routers(section: str) -> Convert:
    """Return the conversion of Megatron's router losses, which are three keys of `section`; 0 and null disable them."""

    def convert(value: object, values: Values) -> object:
        if values.get(f"{section.removesuffix('.model')}.training_backend") == "fsdp":
            raise NotRead("only Megatron gives routers losses of their own")
        return _losses(section, values) or UNSET

    return convert


def losses_of_critic(value: object, values: Values) -> object:
    """Return the losses of a critic's routers; without a value, the critic would inherit the actor's."""
    megatron = values.get("critic.training_backend") != "fsdp"
    return _losses("critic.model", values) if value and megatron and _losses("actor.model", values) else UNSET


def _losses(section: str, values: Values) -> dict[str, object]:
    kind = values.get(f"{section}.{KIND}", "aux_loss")
    if kind not in (None, "none", *BALANCING):
        why = f"no such loss balances experts (supported: none, {', '.join(BALANCING)})"
        raise Unsupported(why, f"{section}.{KIND}")
    weight, of_logits = values.get(f"{section}.{BALANCE}"), values.get(f"{section}.{OF_LOGITS}")
    balanced = {BALANCE: weight, KIND: kind} if weight and kind in BALANCING else {}
    return balanced | ({OF_LOGITS: of_logits} if of_logits else {})


def megatron_model(section: str, native: str) -> Table:
    """Return the rows of a model's section; keys that would change results without a counterpart are refused.

    Args:
        section: section of RLinf's file, `actor.model` or `critic.model`.
        native: native section of the role.
    """
    frozen = Refused("all weights are trained", fine=OFF)
    return {
        **{f"{section}.{name}": ITS_OWN for name in SHAPE},
        **{f"{section}.{name}": MEGATRON for name in LAYERS},
        f"{section}.*_dropout": Refused("nothing is dropped in training", fine=ZERO),
        f"{section}.seq_length": LENGTHS,
        f"{section}.encoder_seq_length": LENGTHS,
        f"{section}.init_method_std": WEIGHTS,
        f"{section}.use_scaled_init_method": WEIGHTS,
        f"{section}.freeze_language_model": frozen,
        f"{section}.freeze_vision_model": frozen,
        f"{section}.freeze_vision_projection": frozen,
        f"{section}.fp8": Refused("number formats are bf16 and fp32", fine=OFF),
        f"{section}.fp8_*": NoEffect("acts with fp8 only"),
        f"{section}.gptq_model": Refused("quantised models are not trained", fine=OFF),
        f"{section}.load_in_8bit": Refused("quantised models are not trained", fine=OFF),
        f"{section}.mcore_customization_config.*": Refused("tether sets up Megatron by itself", fine=({},)),
        **dict.fromkeys(
            (f"{section}.{name}" for name in (BALANCE, OF_LOGITS, KIND)),
            to(f"{native}.megatron.override_transformer_config", by=losses_of_routers(section)),
        ),
        f"{section}.moe_input_jitter_eps": Refused("what experts read is not changed at random", fine=ZERO),
        f"{section}.moe_token_dropping": Refused("experts leave no token out", fine=OFF),
        f"{section}.moe_*": Refused("experts are chosen as the model's config.json says", fine=(*OFF, *ZERO)),
    }
