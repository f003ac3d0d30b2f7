"""One attention function for every transformers model, with the layout of the tokens as an argument.

transformers lets a model call an attention function by name and hands it whatever keyword arguments the model's
forward was given. tether registers one function, ``tether``, and passes it a *layout*: an object that knows which
query may look at which key. Packed training (`Packed`) and cached decoding (`tether.rollout`) are two layouts over
the same module, so both use the very same weights, and no [rows, width] padding or [tokens, tokens] mask is built.

Legend: N = tokens of all sequences laid end to end, H = query heads, K = key/value heads (H = K * G), D = head size.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "tether"


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer says of its attention, beside the tensors."""

    layer: int
    scale: float
    sliding_window: int | None = None  # a query sees itself and the window - 1 keys before it
    softcap: float | None = None  # Gemma 2: scores become softcap * tanh(scores / softcap)


class AttentionLayout(Protocol):
    """Knows which query may look at which key."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend: query [R, H, Q, D], key and value [R, K, Q, D] of the same tokens -> [R, H, Q, Dv]."""
        ...


@dataclass(frozen=True)
class Packed:
    """Sequences laid end to end in one row of N tokens; each attends causally to itself alone."""

    lengths: tuple[int, ...]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionLayout.attend`; R is 1 and Q is N.

        Sequences of like length run together as a padded batch: one kernel call each would cost more than the padding.
        """
        buckets, place = _bucketed(self.lengths, query.device)
        outputs = []
        for tokens in buckets:
            q, k, v = (x[0, :, tokens].transpose(0, 1) for x in (query, key, value))
            outputs.append(_causal(q, k, v, spec).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[place].transpose(0, 1)[None]

    def position_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """[1, N]: each token's position in its own sequence."""
        return torch.cat([torch.arange(length, device=device) for length in self.lengths])[None]


LIKE_LENGTH = 0.75
"""A sequence joins a bucket while it is at least this share as long as the bucket's longest."""


@lru_cache(maxsize=8)  # every layer of a forward and of its backward asks for the same
def _bucketed(lengths: tuple[int, ...], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Group packed sequences by length.

    Returns:
        Of each bucket the token that stands at each place of its padded batch [R, W] (padding repeats a sequence's
        last token, and stands where no causal query looks); and where among all those places each of the N tokens is.
    """
    starts = list(itertools.accumulate(lengths, initial=0))
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not groups or lengths[row] < LIKE_LENGTH * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    buckets, place, offset = [], torch.empty(starts[-1], dtype=torch.int64), 0
    for group in groups:
        width = lengths[group[0]]
        tokens = torch.stack([starts[row] + torch.arange(width).clamp(max=lengths[row] - 1) for row in group])
        for number, row in enumerate(group):
            place[starts[row] : starts[row + 1]] = offset + number * width + torch.arange(lengths[row])
        buckets.append(tokens.to(device))
        offset += tokens.numel()
    return buckets, place.to(device)


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
    assert attention_mask is None, "the layout is the only mask"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    spec = AttentionSpec(int(module.layer_idx), scale, sliding_window, softcap)  # type: ignore[arg-type]
    out = attention_layout.attend(query, key, value, spec)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention_interface)


def use_tether_attention(model: PreTrainedModel) -> None:
    """Make `model` call the layouts of this module; its forward then requires ``attention_layout=``."""
    model.set_attn_implementation(ATTENTION_NAME)
