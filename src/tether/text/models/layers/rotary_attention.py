"""Self-attention with rotary positions, whose rotation is a single operation forward and backward.

transformers computes the rotation with half a dozen tensor operations each for queries and keys, whose intermediate
results autograd saves.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.kernels import AttentionLayout, AttentionSpec, kernels_for
from tether.text.models.layers.fused_modules import replace_modules

REPLACED = (
    "LlamaAttention",
    "MistralAttention",
    "Qwen2Attention",
    "Qwen3Attention",
    "Gemma2Attention",
    "Gemma3Attention",
)
"""transformers' modules that are replaced."""


def spec_of(attention: Any) -> AttentionSpec:
    """Return the attention settings of one of `REPLACED`."""
    has_own_window = hasattr(attention, "sliding_window")
    window = attention.sliding_window if has_own_window else getattr(attention.config, "sliding_window", None)
    softcap = getattr(attention, "attn_logit_softcapping", None)
    return AttentionSpec(attention.layer_idx, attention.scaling, window, softcap)


class RotaryAttention(nn.Module):
    """Replacement for one of `REPLACED`, with all attributes under the same names."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    head_dim: int

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.__dict__.update(attention.__dict__)
        self._without_layout = type(attention).forward

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        *,
        attention_layout: AttentionLayout | None = None,
        **kwargs: Any,  # position ids, the cache (named by the version of transformers), and so on
    ) -> tuple[Tensor, Tensor | None]:
        """Return [R, Q, E] for hidden states [R, Q, E], cosine and sine [R, Q, D]; without a layout, as transformers
        does."""
        if attention_layout is None:
            attended: tuple[Tensor, Tensor | None] = self._without_layout(
                self, hidden_states, position_embeddings, attention_mask, **kwargs
            )
            return attended
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (layer(hidden_states).view(shape) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotated(query, *position_embeddings), rotated(key, *position_embeddings)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = attention_layout.attend(query, key, value, spec_of(self))
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return the heads rotated by `tether.kernels.reference.Reference.rotate`."""
    return kernels_for(heads, cosine, sine).rotate(heads, cosine, sine)


def replace_attentions(model: PreTrainedModel) -> None:
    """Replace every module named in `REPLACED` by a `RotaryAttention`; parameters and their names stay."""
    replace_modules(model, REPLACED, RotaryAttention)
