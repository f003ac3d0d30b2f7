"""One attention function for every transformers model, with the layout of the tokens as an argument.

transformers lets a model call an attention function by name and hands it whatever keyword arguments the model's
forward was given. tether registers one function, ``tether``, and passes it a *layout*: an object that knows which
query may look at which key. Packed training (`Packed`) and cached decoding (`tether.rollout`) are two layouts over
the same module, so both use the very same weights, and no [rows, width] padding or [tokens, tokens] mask is built.

Legend: N = tokens of all sequences laid end to end, H = query heads, K = key/value heads (H = K * G), D = head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tether.kernels.attention_spec import AttentionLayout, AttentionSpec
from tether.kernels.cpu.causal_attention import causal_attention
from tether.kernels.dispatch import pieces_for
from tether.models.layers.gated_mlp import replace_gated_mlps
from tether.models.layers.packed_layout import places_of
from tether.models.layers.rms_norm import replace_norms
from tether.models.layers.rotary_attention import replace_attentions

ATTENTION_NAME = "tether"


@dataclass(frozen=True)
class Packed:
    """Sequences laid end to end in one row of N tokens; each attends causally to itself alone.

    Sequences may share how they begin, as the responses to one prompt do: `after` says which piece a piece continues,
    and a piece that others continue is no sequence of its own. The layers then see a shared prompt once.
    """

    lengths: tuple[int, ...]
    """Tokens of each piece."""
    after: tuple[int | None, ...] | None = None
    """Of each piece the number of the one that it continues, which itself continues none; None: all begin anew."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionLayout.attend`; R is 1 and Q is N."""
        pieces = pieces_for(query, key, value)
        if pieces is not None and pieces.can_attend(query.shape[3], value.shape[3]):
            tokens = (x[0].transpose(0, 1) for x in (query, key, value))
            attended: Tensor = pieces.attention(*tokens, self.lengths, self.after, spec)
            return attended.transpose(0, 1)[None]
        places = places_of(self.lengths, self.after, query.device)
        spread = (places.batches(places.spread(x[0].transpose(0, 1))) for x in (query, key, value))
        outputs = []
        for q, k, v in zip(*spread, strict=True):
            out = _causal(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), spec)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return places.collect(torch.cat(outputs)).transpose(0, 1)[None]

    def position_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """[1, N]: each token's position in its own sequence."""
        after = self.after or (None,) * len(self.lengths)
        first = [0 if prior is None else self.lengths[prior] for prior in after]
        pieces = zip(first, self.lengths, strict=True)
        return torch.cat([torch.arange(start, start + length, device=device) for start, length in pieces])[None]


@dataclass(frozen=True)
class Padded:
    """One sequence a row, padded on the right: a causal query never reaches the padding after it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionLayout.attend`; Q is the padded width, and what comes out at padding is not used."""
        return _causal(query, key, value, spec)


def _causal(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    length = query.shape[2]
    windowed = spec.sliding_window is not None and spec.sliding_window < length
    if not windowed and spec.softcap is None:
        # The kernel has no head sizes apart for keys and values.
        if query.device.type == "cpu" and key.shape[-1] == value.shape[-1]:
            return causal_attention(query, key, value, spec.scale)
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=spec.scale, enable_gqa=gqa)
    position = torch.arange(length, device=query.device)
    visible = visible_keys(position, position, spec)
    return masked_attention(query, key, value, visible, spec)


def visible_keys(query_position: Tensor, key_position: Tensor, spec: AttentionSpec) -> Tensor:
    """Boolean [..., Q, L]: may the query at a position see the key at a position (causal, and in the window)."""
    distance = query_position[..., :, None] - key_position[..., None, :]
    visible = distance >= 0
    if spec.sliding_window is not None:
        visible &= distance < spec.sliding_window
    return visible


def masked_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, spec: AttentionSpec) -> Tensor:
    """Grouped-query attention under a boolean mask `visible`, which broadcasts over [R, K, G, Q, L].

    Query heads are grouped by the key head that they share, so keys and values are never repeated.
    """
    rows, heads, width, size = query.shape
    kv_heads = key.shape[1]
    grouped = query.view(rows, kv_heads, heads // kv_heads, width, size)
    key, value = key.unsqueeze(2), value.unsqueeze(2)
    if spec.softcap is None:
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=visible, scale=spec.scale)
    else:
        scores = torch.matmul(grouped, key.transpose(-1, -2)) * spec.scale
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores.masked_fill(~visible, -math.inf)
        out = torch.matmul(
            scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype),
            value,
        )
    return out.reshape(rows, heads, width, value.shape[-1])


def _attention_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    attention_layout: AttentionLayout,
    **_: Any,  # transformers also passes position ids, cache flags and the like
) -> tuple[Tensor, None]:
    if attention_mask is not None:
        raise TypeError(f"{type(module).__name__} makes a mask of its own beside the layout")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    spec = AttentionSpec(int(module.layer_idx), scale, sliding_window, softcap)  # type: ignore[arg-type]
    out = attention_layout.attend(query, key, value, spec)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention_interface)


def use_tether_attention(model: PreTrainedModel) -> None:
    """Make `model` call the layouts of this module, with our norms, rotations and gated MLPs.

    Its forward then needs a layout, as ``attention_layout=``.
    """
    model.set_attn_implementation(ATTENTION_NAME)
    replace_attentions(model)
    replace_norms(model)
    replace_gated_mlps(model)
