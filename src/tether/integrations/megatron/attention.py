"""Attention of Megatron's layers over packed sequences, and the rotary angles of their tokens.

Megatron packs sequences only with the kernels of Transformer Engine. Here its layers run as for one long sequence, and
`PackedTokens` is passed along with the tokens to separate the sequences: it has the position of each token for the
rotation, and a layout that determines which keys each query attends to, as for models of transformers
(`tether.text.models.layers.Packed`).

Legend: N = tokens on this rank, H = query heads, K = key/value heads, D and E = head size of keys and of values.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from tether.integrations.megatron.without_te import HAS_TRANSFORMER_ENGINE
from tether.kernels import AttentionLayout, AttentionSpec, kernels_for
from tether.text.models.expert_choice import ExpertChoice
from tether.text.models.layers import Packed


@dataclass
class PackedTokens(PackedSeqParams):
    """Data of N tokens that Megatron passes from layer to layer along with their hidden states."""

    layout: AttentionLayout = None  # type: ignore[assignment]  # it follows fields with defaults
    positions: Tensor = None  # type: ignore[assignment]  # [N], of each token in its own sequence
    padding: Tensor = None  # type: ignore[assignment]  # [1, tokens between the matrices], those that count nowhere
    choice: ExpertChoice | None = None  # of the tokens that this rank has between the matrices


@dataclass(frozen=True)
class AttentionOptions:
    """Entries of a model's config that Megatron's config does not have."""

    sliding_windows: tuple[int | None, ...]
    """Sliding window of each layer."""
    rotary_scale: float = 1.0
    """Factor that multiplies cosine and sine: YaRN's attention factor."""


class PackedAttention(MegatronModule):
    """Replaces the core of Megatron's self-attention, which attends with queries, keys and values."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **_: object,  # dropout, which is off, and process groups
    ) -> None:
        super().__init__(config=config)
        options: AttentionOptions = config.tether_attention
        scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        if not config.multi_latent_attention:
            scale *= options.rotary_scale**2  # the factor multiplies both query and key
        window = options.sliding_windows[layer_number - 1]
        self.spec = AttentionSpec(layer_number - 1, scale, window)
        self.fused = _fused(config, layer_number, attn_mask_type, attention_type, scale, k_channels, v_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        packed_seq_params: PackedTokens | None = None,
        **_: object,  # the kind of mask, and biases, which no supported model has
    ) -> Tensor:
        """Return [N, 1, H * E] for query [N, 1, H, D], key [N, 1, K, D], value [N, 1, K, E], or all without the 1."""
        assert packed_seq_params is not None, "attention needs the layout of the tokens"
        query, key, value = (x.flatten(0, -3) for x in (query, key, value))
        layout = packed_seq_params.layout
        if self.fused is not None and self.spec.sliding_window is None and _is_plain(layout):
            attended = self.fused(query, key, value, None, packed_seq_params=_boundaries(layout, query.device))
            return attended.reshape(len(query), 1, -1)
        heads = [x.transpose(0, 1)[None] for x in (query, key, value)]
        attended = layout.attend(heads[0], heads[1], heads[2], self.spec)
        return attended[0].transpose(0, 1).reshape(len(query), 1, -1)


class Rotary(nn.Module):
    """Computes the rotary angles of token positions, with transformers' frequencies for a config."""

    inverse_frequencies: Tensor

    def __init__(self, inverse_frequencies: Tensor, latent: bool, scale: float | None = None) -> None:
        super().__init__()
        self.register_buffer("inverse_frequencies", inverse_frequencies.float(), persistent=False)
        self.latent, self.scale = latent, scale

    def get_rotary_seq_len(self, *args: Any) -> Tensor:
        """Return the positions [N] instead of a length; Megatron passes them to `forward`."""
        packed: PackedTokens = args[4]
        return packed.positions

    def forward(self, positions: Tensor, **_: object) -> Tensor | tuple[Tensor, float]:
        """Return angles [N, 1, 1, D] in radians, repeated for both halves of D, and the scale if Megatron expects one.

        For latent attention, which rotates [N, H, D], angles are [N, 1, D].
        """
        angles = positions[:, None].float() * self.inverse_frequencies.to(positions.device)
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        angles = angles if self.latent else angles[:, None]
        return angles if self.scale is None else (angles, self.scale)


class Norm(nn.Module):
    """RMS norm with the kernels of `tether.kernels`, marked for sequence parallelism; exact in float64."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=_device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [.., E]."""
        return kernels_for(x, self.weight).rms_norm(x, self.weight, self.eps, 0.0)


def has_fused_attention(context: int) -> bool:
    """Return whether Transformer Engine's attention is used: it is installed, there is a GPU, and no context
    parallelism."""
    return HAS_TRANSFORMER_ENGINE and torch.cuda.is_available() and context == 1


def rotary_of(hf_config: Any) -> tuple[Tensor, float]:
    """Return inverse frequencies [D / 2] and the factor that multiplies cosine and sine, as in transformers."""
    parameters = hf_config.rope_parameters
    if parameters["rope_type"] == "default":
        size = getattr(hf_config, "qk_rope_head_dim", None) or head_size(hf_config)
        exponents = torch.arange(0, size, 2, dtype=torch.float) / size
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0
    # Imported here, because most models do not need transformers' modelling code.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inverse_frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf_config, torch.device("cpu"))
    return inverse_frequencies, float(scale)


def head_size(hf_config: Any) -> int:
    """Return the head size of queries and keys."""
    size = getattr(hf_config, "head_dim", None)
    return int(size or hf_config.hidden_size // hf_config.num_attention_heads)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _fused(
    config: Any, layer: int, mask: Any, kind: str, scale: float, k_channels: int | None, v_channels: int | None
) -> nn.Module | None:
    """Return Transformer Engine's attention, or None if it is not used."""
    if not has_fused_attention(config.context_parallel_size):
        return None
    # Imported here, because the module can be imported only with Transformer Engine.
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    fused: nn.Module = TEDotProductAttention(
        config, layer, mask, kind, softmax_scale=scale, k_channels=k_channels, v_channels=v_channels
    )
    return fused


def _is_plain(layout: AttentionLayout) -> bool:
    """Return whether the layout is one of packed sequences that share no prefixes."""
    return isinstance(layout, Packed) and (layout.prefixes is None or not any(p is not None for p in layout.prefixes))


def _boundaries(layout: AttentionLayout, device: torch.device) -> PackedSeqParams:
    assert isinstance(layout, Packed)
    boundaries = torch.tensor([0, *itertools.accumulate(layout.lengths)], dtype=torch.int32, device=device)
    longest = max(layout.lengths)
    return PackedSeqParams("thd", boundaries, boundaries, max_seqlen_q=longest, max_seqlen_kv=longest)
