"""flash-attn over packed segments: no padding.

The queries of a segment see its prefix and the segment itself. flash-attn aligns a causal mask to the last query and
key, so that is one sequence of queries and a longer one of keys.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import cast

import torch
from flash_attn import flash_attn_varlen_func
from torch import Tensor

from tether.kernels.causal_attention import AttentionSpec, with_prefixes

_LARGEST_HEAD = 256


def can_attend(query: Tensor, value: Tensor) -> bool:
    """Return whether flash-attn supports heads of this size and dtype."""
    size = query.shape[-1]
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return is_half and size == value.shape[-1] and size <= _LARGEST_HEAD and size % 8 == 0


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    prefixes: tuple[int | None, ...] | None,
    spec: AttentionSpec,
) -> Tensor:
    """Return what `tether.kernels.reference.Reference.packed_attention` does; requires `can_attend`."""
    key_lengths = lengths
    if prefixes is not None:
        before = [0 if prefix is None else lengths[prefix] for prefix in prefixes]
        key_lengths = tuple(length + more for length, more in zip(lengths, before, strict=True))
        slots = with_prefixes(lengths, prefixes, query.device)
        key, value = slots.spread(key), slots.spread(value)
    out = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=_boundaries(lengths, query.device),
        cu_seqlens_k=_boundaries(key_lengths, query.device),
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(key_lengths),
        softmax_scale=spec.scale,
        causal=True,
        window_size=(-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0),
        softcap=spec.softcap or 0.0,
        deterministic=True,  # so that a resumed run is bitwise the same
    )
    return cast("Tensor", out)


@lru_cache(maxsize=8)  # every layer asks for the same lengths
def _boundaries(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
