"""Rows of a text run's model: its shape, and what RLinf hands on to Megatron-core's own configuration."""

from __future__ import annotations

from tether.config.importers.rlinf.rows import NoEffect, Refuses, Table

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


def megatron_model(section: str) -> Table:
    """Rows of the section of a model, which change no result, or are refused where they would."""
    frozen = Refuses("all weights are trained", fine=OFF)
    return {
        **{f"{section}.{name}": ITS_OWN for name in SHAPE},
        **{f"{section}.{name}": MEGATRON for name in LAYERS},
        f"{section}.*_dropout": Refuses("nothing is dropped in training", fine=ZERO),
        f"{section}.seq_length": LENGTHS,
        f"{section}.encoder_seq_length": LENGTHS,
        f"{section}.init_method_std": WEIGHTS,
        f"{section}.use_scaled_init_method": WEIGHTS,
        f"{section}.freeze_language_model": frozen,
        f"{section}.freeze_vision_model": frozen,
        f"{section}.freeze_vision_projection": frozen,
        f"{section}.fp8": Refuses("number formats are bf16 and fp32", fine=OFF),
        f"{section}.fp8_*": NoEffect("acts with fp8 only"),
        f"{section}.gptq_model": Refuses("quantised models are not trained", fine=OFF),
        f"{section}.load_in_8bit": Refuses("quantised models are not trained", fine=OFF),
        f"{section}.mcore_customization_config.*": Refuses("tether sets up Megatron by itself", fine=({},)),
        f"{section}.moe_aux_loss_coeff": Refuses("no loss balances the experts", fine=ZERO),
        f"{section}.moe_z_loss_coeff": Refuses("no loss keeps the router's logits small", fine=ZERO),
        f"{section}.moe_router_load_balancing_type": Refuses(
            "experts are chosen as the model's config.json says", fine=("aux_loss", "seq_aux_loss", "none", None)
        ),
        f"{section}.moe_input_jitter_eps": Refuses("what experts read is not changed at random", fine=ZERO),
        f"{section}.moe_token_dropping": Refuses("experts leave no token out", fine=OFF),
        f"{section}.moe_*": Refuses("experts are chosen as the model's config.json says", fine=(*OFF, *ZERO)),
    }
