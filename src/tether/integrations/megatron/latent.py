"""Modules of multi-head latent attention that Megatron lacks without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tether.integrations.megatron.attention import Norm, Rotary, rotary_of

_LATENT_EPS = 1e-6  # epsilon of the norms of latents, which transformers does not read from the config


class KeyValueDown(nn.Module):
    """The projection to the latent of keys and values and to the shared rotary key, replicated on each rank.

    Megatron's layer splits the outputs over ranks and gathers them again. Since the heads of all ranks read the rotary
    key, its backward pass loses the gradient of other ranks' columns. Here each rank projects its share of the tokens,
    as Megatron does with Transformer Engine (`tether.integrations.megatron.layout.check` requires sequence parallelism
    with tensor parallelism).
    """

    def __init__(self, like: nn.Module, config: Any) -> None:
        super().__init__()
        weight: Tensor = like.weight  # type: ignore[assignment]
        rows = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.weight = nn.Parameter(torch.empty(rows, config.hidden_size, dtype=weight.dtype, device=weight.device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Return the latent and the rotary key, [N, 1, latent + key], of hidden states [N, 1, E]."""
        return nn.functional.linear(hidden, self.weight), None


def finish_attention(attention: Any, hf_config: Any) -> None:
    """Replace modules of an attention layer that Megatron built."""
    inverse_frequencies, scale = rotary_of(hf_config)
    scaled = attention.config.rope_type == "yarn"
    attention.rotary_pos_emb = Rotary(inverse_frequencies, latent=True, scale=scale if scaled else None)
    attention.linear_kv_down_proj = KeyValueDown(attention.linear_kv_down_proj, attention.config)
    # Since version 0.18, Megatron omits the norms of latents unless Transformer Engine fuses them with a projection.
    if attention.config.q_lora_rank:
        attention.q_layernorm = Norm(attention.config, attention.config.q_lora_rank, _LATENT_EPS)
    attention.kv_layernorm = Norm(attention.config, attention.config.kv_lora_rank, _LATENT_EPS)
