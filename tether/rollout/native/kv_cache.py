"""Keys and values of the sequences being decoded, and the two attention layouts that use them.

The cache holds a fixed number of slots, one sequence each. Position p of the sequence in slot s lies at ``[s, :, p]``
of every layer, so sequences of different lengths need no padding: a query sees its slot's keys up to its own position.

Legend: S = slots, R = rows being decoded (they fill the slots 0..R-1), K = key/value heads, H = K * G query heads,
L = longest prefix among the rows, D and E = head size of keys and of values, N = tokens in one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tether.kernels.attention_spec import AttentionSpec
from tether.kernels.dispatch import loops_for, multiplying_for
from tether.models.layers.attention import Packed, visible_keys

_MORE = 64  # tokens that there is room for at least, after which a cache is made anew
_MULTIPLE = 32  # of tokens: what loops take at a time


class KVCache:
    """One pair of tensors [S, K, capacity, D] and [S, K, capacity, E] a layer.

    A layer's tensors are made when it is first written, with room for twice the longest prefix, or for 64 tokens more,
    and made anew like that when it is used up, always for a multiple of 32: memory follows the lengths that occur and
    not the limit. Positions are written in place.
    """

    def __init__(self, num_slots: int, max_length: int, device: torch.device) -> None:
        """No sequence will be longer than `max_length`."""
        self.num_slots = num_slots
        self.max_length = max_length
        self.device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, slot: Tensor, position: Tensor, length: int, key: Tensor, value: Tensor) -> None:
        """Put key [N, K, D] and value [N, K, E] of N tokens at their slots [N] and positions [N], under `length`."""
        keys, values = self.room(layer, length, key, value)
        keys[slot, :, position] = key
        values[slot, :, position] = value

    def room(self, layer: int, length: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's tensors, with at least `length` positions, for keys and values like these."""
        if layer not in self._layers:
            self._layers[layer] = (self._zeros(key, length), self._zeros(value, length))
        elif length > self._layers[layer][0].shape[2]:
            keys, values = self._layers[layer]
            self._layers[layer] = (self._grown(keys, length), self._grown(values, length))
        return self._layers[layer]

    def has_room(self, length: int) -> bool:
        """Whether no layer has to grow for so many positions."""
        return all(length <= keys.shape[2] for keys, _ in self._layers.values())

    def addresses(self) -> list[int]:
        """Of all layers: where keys and values begin, and how many positions they have."""
        return [
            number
            for keys, values in self._layers.values()
            for number in (keys.data_ptr(), values.data_ptr(), keys.shape[2])
        ]

    def _zeros(self, like: Tensor, length: int) -> Tensor:
        capacity = max(2 * length, length + _MORE)
        # Zeros and not empty: weight 0 times a NaN left in memory would be NaN.
        capacity = -(-min(capacity, self.max_length) // _MULTIPLE) * _MULTIPLE
        return like.new_zeros(self.num_slots, like.shape[1], capacity, like.shape[-1])

    def _grown(self, cached: Tensor, length: int) -> Tensor:
        larger = self._zeros(cached, length)
        larger[:, :, : cached.shape[2]] = cached
        return larger

    def read(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Views of the first `length` positions of the first `rows` slots: [R, K, L, D] and [R, K, L, E]."""
        keys, values = self._layers[layer]
        return keys[:rows, :, :length], values[:rows, :, :length]

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of the slots `source` [M] into the slots `target` [M]."""
        for pair in self._layers.values():
            for cached in pair:
                cached[target, :, :length] = cached[source, :, :length]


@dataclass(frozen=True)
class Prefill:
    """Whole prompts laid end to end; each attends to itself alone, and is written to one slot or several."""

    cache: KVCache
    packed: Packed
    source: Tensor
    """[M] which of the N tokens is written; a token occurs once for each slot of its prompt."""
    slot: Tensor
    """[M] to which slot."""
    position: Tensor
    """[M] at which position."""

    @classmethod
    def plan(cls, cache: KVCache, lengths: Sequence[int], copies: Sequence[int], first_slot: int) -> Prefill:
        """Prompt i has ``lengths[i]`` tokens and goes to the next ``copies[i]`` slots, counted from `first_slot`."""
        length = torch.tensor(lengths)
        prompt = torch.arange(len(lengths)).repeat_interleave(torch.tensor(copies))  # of each slot
        width = length[prompt]
        slot = torch.arange(len(prompt)).repeat_interleave(width)  # of each written token
        position = torch.arange(len(slot)) - (width.cumsum(0) - width)[slot]
        source = (length.cumsum(0) - length)[prompt][slot] + position
        on_device = (x.to(cache.device) for x in (source, first_slot + slot, position))
        return cls(cache, Packed(tuple(lengths)), *on_device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionLayout.attend`: [1, H, N, D] in, [1, H, N, E] out."""
        keys, values = (x[0].transpose(0, 1)[self.source] for x in (key, value))
        self.cache.write(spec.layer, self.slot, self.position, max(self.packed.lengths), keys, values)
        return self.packed.attend(query, key, value, spec)


class Decode:
    """One new token for each of the first R slots."""

    def __init__(self, cache: KVCache, position: Tensor, length: int) -> None:
        """Rows stand at `position` [R] int64, all under `length`."""
        self._cache = cache
        self._slot = torch.arange(len(position), device=position.device)
        self._position = position
        self._length = length
        self._biases: dict[int | None, Tensor] = {}

    def memory(self) -> tuple[int, ...]:
        """While it is the same, `attend` reads and writes the same places; empty where the cache has to grow first."""
        if not self._cache.has_room(self._length):
            return ()
        return len(self._position), self._position.data_ptr(), *self._cache.addresses()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionLayout.attend`: [R, H, 1, D] in, [R, H, 1, E] out."""
        loops = loops_for(query, key, value)
        if loops is not None:
            return self._by_loop(loops, query.squeeze(2), key.squeeze(2), value.squeeze(2), spec)
        rows, heads, _, size = query.shape
        self._cache.write(spec.layer, self._slot, self._position, self._length, key.squeeze(2), value.squeeze(2))
        keys, values = self._cache.read(spec.layer, rows, self._length)
        # The G query heads of one key head stand in the place of G query positions: keys are never repeated.
        query = query.reshape(rows, keys.shape[1], -1, size)
        bias = self._bias(spec, query.dtype)
        if spec.softcap is None:
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=spec.scale)
        else:
            scores = torch.matmul(query, keys.transpose(-1, -2)) * spec.scale
            scores = spec.softcap * torch.tanh(scores / spec.softcap) + bias
            weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
            out = torch.matmul(weights.to(values.dtype), values)
        return out.reshape(rows, heads, 1, -1)

    def _by_loop(self, loops: Any, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """[R, H, D], [R, K, D] and [R, K, E] -> [R, H, 1, E]."""
        rows, heads, size = query.shape
        keys, values = self._cache.room(spec.layer, self._length, key, value)
        groups = heads // keys.shape[1]
        shape = (rows, keys.shape[1], groups, size, values.shape[3], keys.shape[2])
        out = query.new_empty(rows, heads, 1, values.shape[3])
        how = (float(spec.scale), float(spec.softcap or 0), spec.sliding_window or 0)
        views = (number for x in (query, key, value) for number in (x, x.stride(0), x.stride(1)))
        arguments = (*shape, *how, self._position, keys, values, out, *views)
        multiplying = multiplying_for(query)
        if multiplying is not None and multiplying.can_attend(groups, size, values.shape[3]):
            multiplying.attend_to(*arguments)
        else:
            loops.attend(*arguments)
        return out

    def _bias(self, spec: AttentionSpec, dtype: torch.dtype) -> Tensor:
        """[R, 1, 1, L]: 0 where the row sees the key, -inf elsewhere; the layers of one window share it."""
        if spec.sliding_window not in self._biases:
            keys = torch.arange(self._length, device=self._position.device)
            visible = visible_keys(self._position[:, None, None], keys, spec)
            hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -math.inf)
            self._biases[spec.sliding_window] = hidden
        return self._biases[spec.sliding_window]
