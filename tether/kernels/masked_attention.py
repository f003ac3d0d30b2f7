"""Attention under a mask, in plain PyTorch: which keys a query sees, and the weights with a softcap.

Legend: R rows of Q queries, L keys, H = query heads, K = key/value heads (H = K * G), D = head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tether.kernels.attention_spec import AttentionSpec


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
