"""Attention of one new token per row over its cached keys and values, without AVX-512 or AMX.

Legend: R rows, K key/value heads, G query heads per key/value head, C = capacity of the cache in tokens, D and E = head
size of keys and of values.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from tether.kernels.cpu.avx512_instructions import COLUMNS
from tether.kernels.cpu.kernel_signature import BFloat16s, Floats, Ints, bfloat16, int64
from tether.kernels.cpu.openmp_loop import (
    array_bfloat16,
    capped,
    exp,
    f32,
    inline,
    kernel,
    load,
    rounded,
    share,
)

Query = Annotated[int, bfloat16("rows", "heads", "size", strides=("query_row", "query_head"))]
Key = Annotated[int, bfloat16("rows", "kv_heads", "size", strides=("key_row", "key_head"))]
Value = Annotated[int, bfloat16("rows", "kv_heads", "value_size", strides=("value_row", "value_head"))]
Position = Annotated[Ints, int64("rows")]
Keys = Annotated[int, bfloat16("slots", "kv_heads", "capacity", "size")]
Values = Annotated[int, bfloat16("slots", "kv_heads", "capacity", "value_size")]
Out = Annotated[BFloat16s, bfloat16("rows", "heads", "value_size")]


@inline
def _load_four(rows: BFloat16s, first: int, last: int, four: Floats, width: int) -> None:
    """Convert rows `first` to `first + 3` to float32 [4, width], repeating row `last` where there are fewer."""
    for i in range(4):
        of, to = rows[min(first + i, last)], four[i]
        for d in range(width):
            to[d] = load(of[d])


@inline
def softmax(scores: Floats, seen: int, softcap: float) -> None:
    """Apply softmax in place to the first `seen` scores; the following ones up to a multiple of four become 0."""
    padded = (seen + 3) // 4 * 4
    if softcap > 0:
        for n in range(padded):
            scores[n] = capped(scores[n], softcap)
    m0, m1, m2, m3 = scores[0], scores[1], scores[2], scores[3]
    for n in range(4, padded, 4):  # four independent maxima: otherwise each comparison waits for the previous one
        m0 = scores[n] if scores[n] > m0 else m0
        m1 = scores[n + 1] if scores[n + 1] > m1 else m1
        m2 = scores[n + 2] if scores[n + 2] > m2 else m2
        m3 = scores[n + 3] if scores[n + 3] > m3 else m3
    largest, total = max(max(m0, m1), max(m2, m3)), f32(0)
    for n in range(seen):
        scores[n] = exp(scores[n] - largest)
        total += scores[n]
    for n in range(seen):
        scores[n] /= total
    for n in range(seen, padded):
        scores[n] = f32(0)


@inline
def copy(source: int, count: int, target: int) -> None:
    """Copy `count` bfloat16 numbers from one address to another."""
    of, to = array_bfloat16(source, (count,)), array_bfloat16(target, (count,))
    for n in range(count):
        to[n] = of[n]


@inline
def attention_weights(scores: Floats, before: int, seen: int, softcap: float, weights: BFloat16s) -> None:
    """Turn the scores of a query into rounded weights, 0 for the keys before, and for those after up to a multiple of
    32."""
    of, end = scores[before:], before + seen
    for n in range(seen, seen + 3):  # `softmax` reads up to three scores further
        of[n] = of[seen - 1]
    softmax(of, seen, softcap)
    for n in range(before):
        weights[n] = np.uint16(0)
    for n in range(seen):
        weights[before + n] = rounded(of[n])
    for n in range(end, (end + COLUMNS - 1) // COLUMNS * COLUMNS):
        weights[n] = np.uint16(0)


@kernel
def attend(
    query: Query,
    key: Key,
    value: Value,
    position: Position,
    keys: Keys,
    values: Values,
    out: Out,
    scale: float,
    softcap: float,
    window: int,
    rows: int,
    heads: int,
    kv_heads: int,
    capacity: int,
    size: int,
    value_size: int,
    query_row: int,
    query_head: int,
    key_row: int,
    key_head: int,
    value_row: int,
    value_head: int,
) -> None:
    """Attend with one new token per row: write its key and value to the cache, then attend over the keys that it sees.

    query [R, K * G, D], key [R, K, D], value [R, K, E]; the cache: keys [S, K, C, D] and values [S, K, C, E], of which
    the first R slots are used; position [R] of the token; out [R, K * G, E]. A softcap or window of 0 means none. Each
    thread has a share of the R * K key heads. Four keys at a time are converted to float32, once for the G queries that
    share them.
    """
    groups = heads // kv_heads
    all_keys = array_bfloat16(keys, (rows * kv_heads, capacity, size))
    all_values = array_bfloat16(values, (rows * kv_heads, capacity, value_size))
    queries, scores = np.empty((groups, size), np.float32), np.empty((groups, capacity + 3), np.float32)
    sums, four = np.empty((groups, value_size), np.float32), np.empty((4, max(size, value_size)), np.float32)
    f0, f1, f2, f3 = four[0], four[1], four[2], four[3]
    first, last = share(rows * kv_heads)
    for task in range(first, last):
        row, head, row_keys, row_values = task // kv_heads, task % kv_heads, all_keys[task], all_values[task]
        newest = position[row]
        start = max(0, newest + 1 - window) if window > 0 else 0
        seen = newest + 1 - start
        copy(key + 2 * (row * key_row + head * key_head), size, keys + 2 * (task * capacity + newest) * size)
        new_value = value + 2 * (row * value_row + head * value_head)
        copy(new_value, value_size, values + 2 * (task * capacity + newest) * value_size)
        for group in range(groups):
            new = array_bfloat16(query + 2 * (row * query_row + (head * groups + group) * query_head), (size,))
            of, to_sums = queries[group], sums[group]
            for d in range(size):
                of[d] = load(new[d]) * scale
            for d in range(value_size):
                to_sums[d] = f32(0)

        for n in range(0, seen, 4):
            _load_four(row_keys, start + n, newest, four, size)
            for group in range(groups):
                of, to_scores = queries[group], scores[group]
                s0, s1, s2, s3 = f32(0), f32(0), f32(0), f32(0)
                for d in range(size):
                    s0 += of[d] * f0[d]
                    s1 += of[d] * f1[d]
                    s2 += of[d] * f2[d]
                    s3 += of[d] * f3[d]
                to_scores[n], to_scores[n + 1], to_scores[n + 2], to_scores[n + 3] = s0, s1, s2, s3
        for group in range(groups):
            softmax(scores[group], seen, softcap)
        for n in range(0, seen, 4):
            _load_four(row_values, start + n, newest, four, value_size)
            for group in range(groups):
                of, to_sums = scores[group], sums[group]
                s0, s1, s2, s3 = of[n], of[n + 1], of[n + 2], of[n + 3]
                for d in range(value_size):
                    to_sums[d] += s0 * f0[d] + s1 * f1[d] + s2 * f2[d] + s3 * f3[d]
        for group in range(groups):
            of, to = sums[group], out[row, head * groups + group]
            for d in range(value_size):
                to[d] = rounded(of[d])
