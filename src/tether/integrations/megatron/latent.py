"""Multi-head latent attention: modules that Megatron's layers lack without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tether.integrations.megatron.attention import Norm, Rotary, rotary_of

_LATENT_EPS = 1e-6  # epsilon of the norms of latents, which transformers does not read from the config


class KeyValueDown(nn.Module):
    """The projection to the latent of keys and values and to the shared rotary key, replicated on each rank.

    Megatron's own layer splits the outputs and gathers them again. Each rank's heads read the rotary key, and the
    gradient of other ranks' columns is lost in the backward pass. Here each rank projects its share of the tokens
    (`tether.integrations.megatron.layout.check` requires sequence parallelism with tensor parallelism), as Megatron
    does with Transformer Engine.
    """

    def __init__(self, like: nn.Module, config: Any) -> None:
        super().__init__()
        weight: Tensor = like.weight  # type: ignore[assignment]
        rows = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.weight = nn.Parameter(torch.empty(rows, config.hidden_size, dtype=weight.dtype, device=weight.device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Return [N, 1, latent and rotary key] for [N, 1, E]."""
        return nn.functional.linear(hidden, self.weight), None


def finish_attention(attention: Any, hf_config: Any) -> None:
    """Replace modules of an attention layer that Megatron built."""
    inverse_frequencies, scale = rotary_of(hf_config)
    scaled = attention.config.rope_type == "yarn"
    attention.rotary_pos_emb = Rotary(inverse_frequencies, latent=True, scale=scale if scaled else None)
    attention.linear_kv_down_proj = KeyValueDown(attention.linear_kv_down_proj, attention.config)
    # Megatron 0.18 and later build no norm of a latent that Transformer Engine does not fuse with a projection.
    if attention.config.q_lora_rank:
        attention.q_layernorm = Norm(attention.config, attention.config.q_lora_rank, _LATENT_EPS)
    attention.kv_layernorm = Norm(attention.config, attention.config.kv_lora_rank, _LATENT_EPS)
