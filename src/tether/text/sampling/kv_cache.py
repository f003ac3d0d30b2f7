"""Keys and values of the sequences being decoded, and the three attention layouts that use them.

The cache has a fixed number of slots, one sequence each. Position p of the sequence in slot s is at ``[s, :, p]`` of
every layer, so sequences of different lengths need no padding: a query sees the keys of its slot up to its own
position.

Legend: S = slots, R = active rows (in the slots 0..R-1), K = key/value heads, H = K * G query heads, L = longest prefix
among the rows, D and E = head size of keys and of values, N = tokens in one call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.batch import TokenIds
from tether.kernels import AttentionSpec, kernels_for
from tether.text.models.layers import Packed

_MIN_FREE = 64  # minimum number of free positions in a new cache
_MULTIPLE = 32  # positions that a kernel processes at a time


Prefix = dict[int, tuple[Tensor, Tensor]]
"""Keys [K, n, D] and values [K, n, E] of the first n positions of a sequence, by layer."""


def length_of(prefix: Prefix) -> int:
    """Return the number of positions of a prefix."""
    return next(iter(prefix.values()))[0].shape[1]


class PrefixCache:
    """Caches of finished rows, for later prompts that continue them.

    Each is used once, by the first prompt that continues it.

    Args:
        max_tokens: maximum number of tokens in all prefixes; a row that does not fit is not stored.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        """Forget all prefixes, for example when weights change."""
        self._free = self._max_tokens
        self._prefixes: dict[bytes, list[Prefix]] = {}  # token ids -> prefixes, one for each of several equal rows
        self._lengths = Counter[int]()

    def has_room(self, length: int) -> bool:
        """Return whether a prefix of this length fits."""
        return length <= self._free

    def add(self, token_ids: TokenIds, prefix: Prefix) -> None:
        """Store the cache of these tokens, for which there is room."""
        self._prefixes.setdefault(token_ids.tobytes(), []).append(prefix)
        self._free -= len(token_ids)
        self._lengths[len(token_ids)] += 1

    def pop(self, token_ids: TokenIds) -> Prefix | None:
        """Return and forget the longest prefix that is shorter than these tokens."""
        shorter = sorted((length for length in self._lengths if length < len(token_ids)), reverse=True)
        return next((found for length in shorter if (found := self.forget(token_ids[:length])) is not None), None)

    def forget(self, token_ids: TokenIds) -> Prefix | None:
        """Forget the cache of exactly these tokens and return it; None if there is none."""
        key, length = token_ids.tobytes(), len(token_ids)
        if key not in self._prefixes:
            return None
        prefix = self._prefixes[key].pop()
        if not self._prefixes[key]:
            del self._prefixes[key]
        self._free += length
        self._lengths[length] -= 1
        self._lengths += Counter()  # drops lengths with a count of zero
        return prefix


class KVCache:
    """One pair of tensors [S, K, capacity, D] and [S, K, capacity, E] for each layer.

    A layer's tensors are allocated at the first write, for twice the longest prefix or for 64 more tokens, rounded up
    to a multiple of 32, and reallocated in the same way when they are full: memory follows the actual lengths and not
    the limit. Positions are written in place.
    """

    def __init__(self, num_slots: int, max_length: int, device: torch.device) -> None:
        """Create an empty cache for sequences of at most `max_length` tokens."""
        self.num_slots = num_slots
        self.max_length = max_length
        self.device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, slot: Tensor, position: Tensor, length: int, key: Tensor, value: Tensor) -> None:
        """Store key [N, K, D] and value [N, K, E] of N tokens at their slots [N] and positions [N], below `length`."""
        keys, values = self.room(layer, length, key, value)
        keys[slot, :, position] = key
        values[slot, :, position] = value

    def room(self, layer: int, length: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's tensors with at least `length` positions; `key` and `value` determine their shape and
        dtype."""
        if layer not in self._layers:
            self._layers[layer] = (self._zeros(key, length), self._zeros(value, length))
        elif length > self._layers[layer][0].shape[2]:
            keys, values = self._layers[layer]
            self._layers[layer] = (self._grown(keys, length), self._grown(values, length))
        return self._layers[layer]

    def has_room(self, length: int) -> bool:
        """Return whether all layers have space for this many positions."""
        return all(length <= keys.shape[2] for keys, _ in self._layers.values())

    def addresses(self) -> list[int]:
        """Return for all layers the addresses of keys and values, and the number of positions."""
        return [
            number
            for keys, values in self._layers.values()
            for number in (keys.data_ptr(), values.data_ptr(), keys.shape[2])
        ]

    def _zeros(self, like: Tensor, length: int) -> Tensor:
        capacity = max(2 * length, length + _MIN_FREE)
        # Zeros and not empty: uninitialized memory may contain NaN, and 0 * NaN is NaN.
        capacity = -(-min(capacity, self.max_length) // _MULTIPLE) * _MULTIPLE
        return like.new_zeros(self.num_slots, like.shape[1], capacity, like.shape[-1])

    def _grown(self, cached: Tensor, length: int) -> Tensor:
        larger = self._zeros(cached, length)
        larger[:, :, : cached.shape[2]] = cached
        return larger

    def read(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return views of the first `length` positions of the first `rows` slots: [R, K, L, D] and [R, K, L, E]."""
        keys, values = self._layers[layer]
        return keys[:rows, :, :length], values[:rows, :, :length]

    def copy_of(self, slot: int, length: int) -> Prefix:
        """Return a copy of the first `length` positions of a slot."""
        return {
            layer: (keys[slot, :, :length].clone(), values[slot, :, :length].clone())
            for layer, (keys, values) in self._layers.items()
        }

    def put(self, prefix: Prefix, slot: int) -> None:
        """Copy a prefix to the beginning of a slot."""
        for layer, (key, value) in prefix.items():
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
    """Concatenated prompts; each attends to itself only, and is written to one or several slots."""

    cache: KVCache
    packed: Packed
    source: Tensor
    """[M] index of each written token among the N tokens; a token occurs once for each slot of its prompt."""
    slot: Tensor
    """[M] slot of each written token."""
    position: Tensor
    """[M] position of each written token."""

    @classmethod
    def plan(cls, cache: KVCache, lengths: Sequence[int], copies: Sequence[int], first_slot: int) -> Prefill:
        """Plan a prefill: prompt i has ``lengths[i]`` tokens and goes to the next ``copies[i]`` slots from `first_slot`
        on."""
        length = torch.tensor(lengths)
        prompt = torch.arange(len(lengths)).repeat_interleave(torch.tensor(copies))  # prompt of each slot
        width = length[prompt]
        slot = torch.arange(len(prompt)).repeat_interleave(width)  # slot of each written token
        position = torch.arange(len(slot)) - (width.cumsum(0) - width)[slot]
        source = (length.cumsum(0) - length)[prompt][slot] + position
        on_device = (x.to(cache.device) for x in (source, first_slot + slot, position))
        return cls(cache, Packed(tuple(lengths)), *on_device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = (x[0].transpose(0, 1)[self.source] for x in (key, value))
        self.cache.write(spec.layer, self.slot, self.position, max(self.packed.lengths), keys, values)
        return self.packed.attend(query, key, value, spec)


@dataclass(frozen=True)
class Continue:
    """New tokens of sequences that the cache already has, for R consecutive slots, concatenated."""

    cache: KVCache
    length: int
    """Length of the longest sequence."""
    first_slot: int
    slot: Tensor
    """[N] slot of each token."""
    position: Tensor
    """[N] position of each token in its sequence."""
    padded: Tensor
    """[R, Q] the new tokens of each slot; the last one is repeated as padding."""
    index: Tensor
    """[N] flat index of each token in `padded`."""

    @classmethod
    def plan(cls, cache: KVCache, starts: Sequence[int], added: Sequence[int], first_slot: int) -> Continue:
        """Plan a continuation: slot ``first_slot + i`` has ``starts[i]`` tokens, to which ``added[i]`` are added."""
        start, count = torch.tensor(starts), torch.tensor(added)
        row = torch.arange(len(added)).repeat_interleave(count)
        begin = count.cumsum(0) - count
        offset = torch.arange(len(row)) - begin[row]
        width = int(count.max())
        padded = begin[:, None] + torch.minimum(torch.arange(width), count[:, None] - 1)
        tensors = (first_slot + row, start[row] + offset, padded, row * width + offset)
        on_device = tuple(x.to(cache.device) for x in tensors)
        return cls(cache, int((start + count).max()), first_slot, *on_device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
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
        return out.transpose(1, 2).flatten(0, 1)[self.index].transpose(0, 1)[None]


class Decode:
    """One new token for each of the first R slots."""

    def __init__(self, cache: KVCache, position: Tensor, length: int) -> None:
        """Create a layout for tokens at `position` [R] int64, all below `length`."""
        self._cache = cache
        self._position = position
        self._length = length
        self._biases: dict[int | None, Tensor] = {}

    def memory(self) -> tuple[int, ...]:
        """Return the addresses that `attend` uses; empty if the cache has to grow first."""
        if not self._cache.has_room(self._length):
            return ()
        return len(self._position), self._position.data_ptr(), *self._cache.addresses()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        query, key, value = query.squeeze(2), key.squeeze(2), value.squeeze(2)
        keys, values = self._cache.room(spec.layer, self._length, key, value)
        kernels = kernels_for(query, key, value)
        # A recorded step is replayed for other lengths, so it reads all allocated positions.
        length = keys.shape[2] if kernels.captures else self._length
        return kernels.decode_attention(query, key, value, keys, values, self._position, length, spec, self._biases)
