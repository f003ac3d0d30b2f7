"""Keys and values of the sequences being decoded, and the three attention layouts that use them.

The cache holds a fixed number of slots, one sequence each. Position p of the sequence in slot s lies at ``[s, :, p]``
of every layer, so sequences of different lengths need no padding: a query sees its slot's keys up to its own position.

Legend: S = slots, R = rows being decoded (they fill the slots 0..R-1), K = key/value heads, H = K * G query heads,
L = longest prefix among the rows, D and E = head size of keys and of values, N = tokens in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.kernels import AttentionSpec, kernels_for
from tether.models.layers import Packed

_MORE = 64  # tokens that there is room for at least, after which a new cache is made
_MULTIPLE = 32  # of tokens: what kernels take at a time


Prefix = list[tuple[Tensor, Tensor]]
"""Keys [K, n, D] and values [K, n, E] of the first n positions of a sequence, of every layer."""


class KVCache:
    """One pair of tensors [S, K, capacity, D] and [S, K, capacity, E] a layer.

    A layer's tensors are made when it is first written, with room for twice the longest prefix, or for 64 tokens more,
    and reallocated the same way when it is used up, always for a multiple of 32: memory follows the lengths that occur
    and not the limit. Positions are written in place.
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

    def copy_of(self, slot: int, length: int) -> Prefix:
        """The first `length` positions of a slot."""
        return [
            (keys[slot, :, :length].clone(), values[slot, :, :length].clone()) for keys, values in self._layers.values()
        ]

    def put(self, prefix: Prefix, slot: int) -> None:
        """Put a copy at the beginning of a slot."""
        for layer, (key, value) in zip(self._layers, prefix, strict=True):
            length = key.shape[1]
            keys, values = self.room(layer, length, key[None], value[None])
            keys[slot, :, :length], values[slot, :, :length] = key, value

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


@dataclass(frozen=True)
class Continue:
    """Tokens added to sequences that the cache already holds: the pieces of R neighbouring slots, laid end to end."""

    cache: KVCache
    length: int
    """Of the longest sequence."""
    first_slot: int
    slot: Tensor
    """[N] of each token."""
    position: Tensor
    """[N] of each token in its sequence."""
    padded: Tensor
    """[R, Q] the tokens of each piece; the last one of a shorter piece repeats."""
    place: Tensor
    """[N] where each token stands in it, rows laid end to end."""

    @classmethod
    def plan(cls, cache: KVCache, starts: Sequence[int], pieces: Sequence[int], first_slot: int) -> Continue:
        """Slot ``first_slot + i`` holds ``starts[i]`` tokens, to which ``pieces[i]`` are added."""
        start, piece = torch.tensor(starts), torch.tensor(pieces)
        row = torch.arange(len(pieces)).repeat_interleave(piece)
        begin = piece.cumsum(0) - piece
        offset = torch.arange(len(row)) - begin[row]
        width = int(piece.max())
        padded = begin[:, None] + torch.minimum(torch.arange(width), piece[:, None] - 1)
        parts = (first_slot + row, start[row] + offset, padded, row * width + offset)
        on_device = tuple(x.to(cache.device) for x in parts)
        return cls(cache, int((start + piece).max()), first_slot, *on_device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionLayout.attend`: [1, H, N, D] in, [1, H, N, E] out."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        self.cache.write(spec.layer, self.slot, self.position, self.length, key, value)
        keys, values = self.cache.read(spec.layer, self.first_slot + len(self.padded), self.length)
        out = kernels_for(query, key, value).continued_attention(
            query[self.padded].transpose(1, 2),
            keys[self.first_slot :],
            values[self.first_slot :],
            self.position[self.padded],
            spec,
        )
        return out.transpose(1, 2).flatten(0, 1)[self.place].transpose(0, 1)[None]


class Decode:
    """One new token for each of the first R slots."""

    def __init__(self, cache: KVCache, position: Tensor, length: int) -> None:
        """Rows stand at `position` [R] int64, all under `length`."""
        self._cache = cache
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
        query, key, value = query.squeeze(2), key.squeeze(2), value.squeeze(2)
        keys, values = self._cache.room(spec.layer, self._length, key, value)
        kernels = kernels_for(query, key, value)
        # A recorded step is run again at other lengths: it looks at all positions that there are.
        length = keys.shape[2] if kernels.captures else self._length
        return kernels.decode_attention(query, key, value, keys, values, self._position, length, spec, self._biases)
