"""Attention over packed pieces in compiled loops: no padding, no repeated prompts, and a way back of its own.

The tokens of a piece are taken in blocks of 32, so that a thread has one block of one head at a time. What a product
reads in columns `arrange` puts in order before: *turned*, tokens are columns; *paired*, they are what is summed over.

With P = softmax(scale Q K^T) over what a query sees and dO the gradient of the output (Dao et al., "FlashAttention",
2022, appendix B.2)::

    O = P V    dV = P^T dO    dS = P * (dO V^T - rowsum(P * dO V^T))    dQ = scale dS K    dK = scale dS^T Q

A softcap c (Gemma 2) turns scores s into c tanh(s / c), and multiplies dS with 1 - tanh(s / c)^2. Products take
bfloat16 numbers and sum in float32; P and dS are rounded between two of them. Each number is summed by one thread, in
an order that neither the number of threads nor the other pieces change.

Legend: N tokens, B blocks, K key/value heads, H = K * G query heads, D and E = head size of keys and of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor
from torch.autograd.function import once_differentiable

from tether.kernels.attention_spec import AttentionSpec
from tether.kernels.cpu.avx512_instructions import COLUMNS, add_products, side_by_side, transposed
from tether.kernels.cpu.openmp_loop import (
    Loop,
    bfloat16s,
    capped,
    exp,
    float32s,
    float_of,
    inline,
    keep,
    pointer,
    rounded,
    share,
)

_BLOCK = COLUMNS
_HIDDEN = np.float32(-1e30)
_FIELDS = 9
_FIRST, _COUNT, _OFFSET, _OWN, _END, _BEFORE, _SEEN_BEFORE, _FOLLOWING, _FOLLOWERS = range(_FIELDS)


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of 32 tokens lie; made by `blocks_of`."""

    table: Tensor
    """[B, 9] int64: first token, how many tokens, place of the first in its piece; first block of the piece, and the
    one after its last; first block of the piece before it and that one's tokens (0: none); where among the `following`
    those of its piece begin, and how many they are."""
    following: Tensor
    """Blocks of the pieces that continue a piece: with those of the piece from a block on, they look at its keys."""
    longest: int
    """Keys that a query can see, rounded up to whole blocks."""


@lru_cache(maxsize=8)  # every layer of a forward and of its backward asks for the same
def blocks_of(lengths: tuple[int, ...], after: tuple[int | None, ...] | None) -> Blocks:
    """The blocks of the pieces that `tether.models.layers.attention.Packed` describes."""
    counts = [-(-length // _BLOCK) for length in lengths]
    own = [sum(counts[:piece]) for piece in range(len(counts))]
    prior = after or (None,) * len(lengths)
    continuing: list[list[int]] = [[] for _ in lengths]
    for piece, before in enumerate(prior):
        if before is not None:
            continuing[before].extend(range(own[piece], own[piece] + counts[piece]))
    table: list[tuple[int, ...]] = []
    following: list[int] = []
    longest = token = 0
    for piece, (length, before) in enumerate(zip(lengths, prior, strict=True)):
        ahead = (0, 0) if before is None else (own[before], lengths[before])
        longest = max(longest, counts[piece] + -(-ahead[1] // _BLOCK))
        blocks, followers = (own[piece], own[piece] + counts[piece]), (len(following), len(continuing[piece]))
        for offset in range(0, length, _BLOCK):
            table.append((token + offset, min(_BLOCK, length - offset), offset, *blocks, *ahead, *followers))
        following.extend(continuing[piece])
        token += length
    return Blocks(torch.tensor(table), torch.tensor(following, dtype=torch.int64), longest * _BLOCK)


@Loop
def arrange(p: Any) -> None:
    """x [N, heads, D] with strides -> `turned` [heads, B, D / 2, 32] and `paired` [heads, D / 32, 16 B, 32], or one.

    Both are pairs of numbers: of a token, whose block stands side by side as columns; and of two tokens, one of which
    follows the other. After a block's last token come zeros. An address of 0 says that one is not wanted.
    """
    a = carray(p, (9,))
    heads, blocks, size, x, stride, stride_of_head, turned, paired = a[0], a[1], a[2], a[3], a[4], a[5], a[7], a[8]
    table = carray(pointer(a[6], np.int64(0)), (blocks, _FIELDS))
    zeros = np.zeros(_BLOCK, np.uint16)
    nothing = np.int64(zeros.ctypes.data)
    first, last = share(heads * blocks)
    for task in range(first, last):
        head, block = task // blocks, task % blocks
        count, row = table[block, _COUNT], x + 2 * (table[block, _FIRST] * stride + head * stride_of_head)
        for chunk in range(0, size, _BLOCK):
            if turned != 0:
                for i in range(0, _BLOCK, 16):
                    to = turned + 2 * _BLOCK * (size * task + chunk) + 4 * i
                    transposed(row + 2 * (i * stride + chunk), 2 * stride, count - i, nothing, to)
            if paired != 0:
                to = paired + 2 * _BLOCK * ((head * size + chunk) * blocks + _BLOCK * block)
                for i in range(0, _BLOCK, 2):
                    even = row + 2 * (i * stride + chunk)
                    odd = even + 2 * stride
                    side_by_side(even if i < count else nothing, odd if i + 1 < count else nothing, to + 64 * i)
    keep(zeros)


@inline
def _whole(tokens: Any) -> Any:
    """So many tokens, rounded up to whole blocks."""
    return (tokens + _BLOCK - 1) // _BLOCK * _BLOCK


@inline
def _scores(x: Any, stride: Any, block: Any, before: Any, columns: Any, turned: Any, pairs: Any, out: Any) -> None:
    """Sums of a block's rows with the columns of all keys that it may see, `before` of them of the piece before."""
    for column in range(0, columns, _BLOCK):
        mine = column - before
        at = block[_OWN] + mine // _BLOCK if mine >= 0 else block[_BEFORE] + column // _BLOCK
        to = out.ctypes.data + 4 * column
        add_products(x, stride, block[_COUNT], turned + 4 * _BLOCK * pairs * at, pairs, to, 4 * out.shape[1], 1)


@inline
def _weighted(weights: Any, block: Any, before: Any, columns: Any, paired: Any, out: Any) -> None:
    """Sums [32, 32] of what the columns of `weights` stand for, weighted with them; a row for each of the block's."""
    stride, at, rows = 2 * weights.shape[1], np.int64(weights.ctypes.data), block[_COUNT]
    if before > 0:
        add_products(at, stride, rows, paired + 64 * _BLOCK * block[_BEFORE], before // 2, out, 4 * _BLOCK, 1)
    mine, fresh = paired + 64 * _BLOCK * block[_OWN], 1 if before == 0 else 0
    add_products(at + 2 * before, stride, rows, mine, (columns - before) // 2, out, 4 * _BLOCK, fresh)


@inline
def _hide(scores: Any, place: Any, before: Any, seen_before: Any, columns: Any, window: Any) -> None:
    """Cover what the query at a place of its piece does not see: what is after it, outside the window, or padding."""
    first = max(0, seen_before + place + 1 - window) if window > 0 else 0
    for n in range(min(first, seen_before)):
        scores[n] = _HIDDEN
    for n in range(seen_before, before + max(0, first - seen_before)):
        scores[n] = _HIDDEN
    for n in range(before + place + 1, columns):
        scores[n] = _HIDDEN


@inline
def _scale(scores: Any, scale: Any, softcap: Any) -> None:
    if softcap > 0:
        for n in range(len(scores)):
            scores[n] = capped(scores[n] * scale, softcap)
    else:
        for n in range(len(scores)):
            scores[n] *= scale


@inline
def _slope(capped: Any, softcap: Any) -> Any:
    """The derivative of a capped score by what was capped."""
    return np.float32(1) if softcap == 0 else np.float32(1) - (capped / softcap) * (capped / softcap)


@inline
def _largest(scores: Any, tops: Any) -> Any:
    """Of whole blocks of scores; it may be NaN where one is."""
    for i in range(_BLOCK):
        tops[i] = scores[i]
    for n in range(_BLOCK, len(scores), _BLOCK):
        for i in range(_BLOCK):
            tops[i] = scores[n + i] if scores[n + i] > tops[i] else tops[i]
    largest = tops[0]
    for i in range(1, _BLOCK):
        largest = tops[i] if tops[i] > largest else largest
    return largest


@Loop
def attend(p: Any) -> None:
    """query [N, H, D] with strides, turned keys, paired values -> out [N, H, E], log_sum [H, 32 B]."""
    a = carray(p, (17,))
    blocks, kv_heads, groups, size, value_size = a[0], a[1], a[2], a[3], a[4]
    scale, softcap, window, longest = float_of(a[5]), float_of(a[6]), a[7], a[8]
    query, stride, stride_of_head, turned_keys, paired_values, out = a[10], a[11], a[12], a[13], a[14], a[15]
    table, heads = carray(pointer(a[9], np.int64(0)), (blocks, _FIELDS)), kv_heads * groups
    log_sum = float32s(a[16], (heads, blocks, _BLOCK))
    scores, weights = np.empty((_BLOCK, longest), np.float32), np.empty((_BLOCK, longest), np.uint16)
    sums, tops, masses = np.empty((_BLOCK, _BLOCK), np.float32), np.empty(_BLOCK, np.float32), np.empty(_BLOCK)
    first, last = share(heads * blocks)
    for task in range(first, last):
        head, number = task // blocks, task % blocks
        kv_head, block = head // groups, table[number]
        before = _whole(block[_SEEN_BEFORE])
        columns = before + block[_OFFSET] + _BLOCK
        rows, keys = query + 2 * (block[_FIRST] * stride + head * stride_of_head), 2 * _BLOCK * size * blocks * kv_head
        _scores(rows, 2 * stride, block, before, columns, turned_keys + keys, size // 2, scores)
        for i in range(_BLOCK):
            log_sum[head, number, i] = np.float32(0)
        for i in range(block[_COUNT]):
            of, to, total = scores[i, :columns], weights[i], np.float32(0)
            _scale(of, scale, softcap)
            _hide(of, block[_OFFSET] + i, before, block[_SEEN_BEFORE], columns, window)
            largest = _largest(of, tops)
            for n in range(columns):
                e = exp(of[n] - largest)
                total += e
                to[n] = rounded(e)
            masses[i] = total
            log_sum[head, number, i] = largest + np.log(total)
        for chunk in range(0, value_size, _BLOCK):
            values = paired_values + 2 * _BLOCK * blocks * (kv_head * value_size + chunk)
            _weighted(weights, block, before, columns, values, np.int64(sums.ctypes.data))
            for i in range(block[_COUNT]):
                at = ((block[_FIRST] + i) * heads + head) * value_size + chunk
                to, of, factor = bfloat16s(out + 2 * at, (_BLOCK,)), sums[i], np.float32(1 / masses[i])
                for e in range(_BLOCK):
                    to[e] = rounded(of[e] * factor)
    keep(scores)
    keep(weights)
    keep(sums)


@Loop
def queries_backward(p: Any) -> None:
    """As `attend`, with keys both ways, turned values, grad [N, H, E] -> grad of the query, `along` [H, 32 B].

    `along` is rowsum(P * dO V^T).
    """
    a = carray(p, (20,))
    blocks, kv_heads, groups, size, value_size = a[0], a[1], a[2], a[3], a[4]
    scale, softcap, window, longest = float_of(a[5]), float_of(a[6]), a[7], a[8]
    query, stride, stride_of_head, grad_out = a[10], a[11], a[12], a[13]
    turned_keys, paired_keys, turned_values, grad_query = a[14], a[15], a[16], a[17]
    table, heads = carray(pointer(a[9], np.int64(0)), (blocks, _FIELDS)), kv_heads * groups
    log_sum, along = float32s(a[18], (heads, blocks, _BLOCK)), float32s(a[19], (heads, blocks, _BLOCK))
    scores, grads = np.empty((_BLOCK, longest), np.float32), np.empty((_BLOCK, longest), np.float32)
    changes, sums = np.empty((_BLOCK, longest), np.uint16), np.empty((_BLOCK, _BLOCK), np.float32)
    first, last = share(heads * blocks)
    for task in range(first, last):
        head, number = task // blocks, task % blocks
        kv_head, block = head // groups, table[number]
        before = _whole(block[_SEEN_BEFORE])
        columns = before + block[_OFFSET] + _BLOCK
        rows, keys = query + 2 * (block[_FIRST] * stride + head * stride_of_head), 2 * _BLOCK * size * blocks * kv_head
        _scores(rows, 2 * stride, block, before, columns, turned_keys + keys, size // 2, scores)
        rows = grad_out + 2 * (block[_FIRST] * heads + head) * value_size
        values = turned_values + 2 * _BLOCK * value_size * blocks * kv_head
        _scores(rows, 2 * heads * value_size, block, before, columns, values, value_size // 2, grads)
        for i in range(_BLOCK):
            along[head, number, i] = np.float32(0)
        for i in range(block[_COUNT]):
            of, back, to, total, mean = (
                scores[i, :columns],
                grads[i],
                changes[i],
                log_sum[head, number, i],
                np.float32(0),
            )
            _scale(of, scale, softcap)
            _hide(of, block[_OFFSET] + i, before, block[_SEEN_BEFORE], columns, window)
            for n in range(columns):
                mean += exp(of[n] - total) * back[n]
            along[head, number, i] = mean
            for n in range(columns):
                weight = exp(of[n] - total)
                to[n] = rounded(weight * (back[n] - mean) * _slope(of[n], softcap) if weight > 0 else np.float32(0))
        for chunk in range(0, size, _BLOCK):
            keys = paired_keys + 2 * _BLOCK * blocks * (kv_head * size + chunk)
            _weighted(changes, block, before, columns, keys, np.int64(sums.ctypes.data))
            for i in range(block[_COUNT]):
                at = ((block[_FIRST] + i) * heads + head) * size + chunk
                to, sums_of_row = bfloat16s(grad_query + 2 * at, (_BLOCK,)), sums[i]
                for d in range(_BLOCK):
                    to[d] = rounded(sums_of_row[d] * scale)
    keep(scores)
    keep(grads)
    keep(changes)
    keep(sums)


@inline
def _add_looking(
    weights: Any, count: Any, paired: Any, size: Any, blocks: Any, head: Any, looker: Any, sums: Any
) -> None:
    """Add to sums [32, size] what the 32 queries of a block give to each of so many keys, by their weights."""
    for chunk in range(0, size, _BLOCK):
        columns = paired + 2 * _BLOCK * ((head * size + chunk) * blocks + _BLOCK * looker)
        to = np.int64(sums.ctypes.data) + 4 * chunk
        add_products(np.int64(weights.ctypes.data), 2 * _BLOCK, count, columns, _BLOCK // 2, to, 4 * size, 0)


@inline
def _round(sums: Any, block: Any, factor: Any, kv_heads: Any, kv_head: Any, out: Any) -> None:
    """Sums [32, size] times a factor -> those tokens and that head of `out` [N, K, size]."""
    size = sums.shape[1]
    for i in range(block[_COUNT]):
        to = bfloat16s(out + 2 * ((block[_FIRST] + i) * kv_heads + kv_head) * size, (size,))
        of = sums[i]
        for d in range(size):
            to[d] = rounded(of[d] * factor)


@Loop
def keys_backward(p: Any) -> None:
    """key [N, K, D], value [N, K, E] with strides, query and grad both ways -> grad of key and value.

    A block of keys goes through the queries that look at it, and adds up what each gives.
    """
    a = carray(p, (26,))
    blocks, kv_heads, groups, size, value_size = a[0], a[1], a[2], a[3], a[4]
    scale, softcap, window = float_of(a[5]), float_of(a[6]), a[7]
    turned_query, paired_query, turned_grad, paired_grad = a[18], a[19], a[20], a[21]
    table = carray(pointer(a[9], np.int64(0)), (blocks, _FIELDS))
    following = carray(pointer(a[10], np.int64(0)), (a[11],))
    heads = kv_heads * groups
    log_sum, along = float32s(a[22], (heads, blocks, _BLOCK)), float32s(a[23], (heads, blocks, _BLOCK))
    scores, grads = np.empty((_BLOCK, _BLOCK), np.float32), np.empty((_BLOCK, _BLOCK), np.float32)
    weights, changes = np.empty((_BLOCK, _BLOCK), np.uint16), np.empty((_BLOCK, _BLOCK), np.uint16)
    of_key, of_value = np.empty((_BLOCK, size), np.float32), np.empty((_BLOCK, value_size), np.float32)
    to_scores, to_grads = np.int64(scores.ctypes.data), np.int64(grads.ctypes.data)
    first, last = share(kv_heads * blocks)
    for task in range(first, last):
        kv_head, block = task // blocks, table[task % blocks]
        count = block[_COUNT]
        keys, values = a[12] + 2 * (block[_FIRST] * a[13] + kv_head * a[14]), a[15]
        values += 2 * (block[_FIRST] * a[16] + kv_head * a[17])
        of_key[:] = np.float32(0)
        of_value[:] = np.float32(0)
        own = block[_END] - task % blocks
        looking = own + block[_FOLLOWERS]
        for look in range(groups * looking):
            head, n = kv_head * groups + look // looking, look % looking
            looker = task % blocks + n if n < own else following[block[_FOLLOWING] + n - own]
            at = 2 * _BLOCK * (head * blocks + looker)
            add_products(keys, 2 * a[13], count, turned_query + at * size, size // 2, to_scores, 4 * _BLOCK, 1)
            turned = turned_grad + at * value_size
            add_products(values, 2 * a[16], count, turned, value_size // 2, to_grads, 4 * _BLOCK, 1)
            totals, means = log_sum[head, looker], along[head, looker]
            is_own = table[looker, _OWN] == block[_OWN]
            distance = table[looker, _OFFSET] - block[_OFFSET] + (0 if is_own else table[looker, _SEEN_BEFORE])
            for i in range(count):
                of, back, to, to_change = scores[i], grads[i], weights[i], changes[i]
                _scale(of, scale, softcap)
                for j in range(_BLOCK):
                    far = distance + j - i
                    is_seen = far >= 0 and (window == 0 or far < window)
                    weight = exp(of[j] - totals[j]) if is_seen else np.float32(0)
                    to[j] = rounded(weight)
                    to_change[j] = rounded(weight * (back[j] - means[j]) * _slope(of[j], softcap))
            _add_looking(changes, count, paired_query, size, blocks, head, looker, of_key)
            _add_looking(weights, count, paired_grad, value_size, blocks, head, looker, of_value)
        _round(of_key, block, scale, kv_heads, kv_head, a[24])
        _round(of_value, block, np.float32(1), kv_heads, kv_head, a[25])
    keep(scores)
    keep(grads)
    keep(weights)
    keep(changes)
    keep(of_key)
    keep(of_value)


def can_attend(size: int, value_size: int) -> bool:
    """Whether heads of these sizes can be attended to."""
    return size % COLUMNS == value_size % COLUMNS == 0


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    after: Sequence[int | None] | None,
    spec: AttentionSpec,
) -> Tensor:
    """Causal attention of packed pieces, in the window and with the softcap that the layer has; `can_attend` them.

    Args:
        query: [N, H, D] bfloat16, of any strides but the last.
        key: [N, K, D].
        value: [N, K, E].
        lengths: as `tether.models.layers.attention.Packed` has them.
        after: the same.
        spec: of the layer.

    Returns:
        [N, H, E].
    """
    blocks = blocks_of(tuple(lengths), None if after is None else tuple(after))
    attended: Tensor = _Attention.apply(query, key, value, blocks, spec)
    return attended


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, spec: AttentionSpec) -> Tensor:
        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
        out = query.new_empty(*query.shape[:2], value.shape[2])
        log_sum = query.new_empty(query.shape[1], len(blocks.table), _BLOCK, dtype=torch.float32)
        how = _how(query, key, value, blocks, spec)
        sides = (*_arranged(key, blocks, paired=False), *_arranged(value, blocks, turned=False))
        attend(*how, *_rows(query), *sides, out, log_sum)
        ctx.save_for_backward(query, key, value, log_sum)
        ctx.blocks, ctx.spec = blocks, spec
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, log_sum = ctx.saved_tensors
        blocks, grad, along = ctx.blocks, grad.contiguous(), torch.empty_like(log_sum)
        of_query, of_key, of_value = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
        )
        how = _how(query, key, value, blocks, ctx.spec)
        sides = (*_arranged(key, blocks), *_arranged(value, blocks, paired=False))
        queries_backward(*how, *_rows(query), grad, *sides, of_query, log_sum, along)
        following = (blocks.following, len(blocks.following))
        sides = (*_arranged(query, blocks), *_arranged(grad, blocks))
        keys_backward(*how, *following, *_rows(key), *_rows(value), *sides, log_sum, along, of_key, of_value)
        return of_query, of_key, of_value, None, None


def _how(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, spec: AttentionSpec) -> tuple[Any, ...]:
    """What all three loops begin with."""
    sizes = (len(blocks.table), key.shape[1], query.shape[1] // key.shape[1], key.shape[2], value.shape[2])
    scores = (float(spec.scale), float(spec.softcap or 0), spec.sliding_window or 0)
    return *sizes, *scores, blocks.longest, blocks.table


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    return x, x.stride(0), x.stride(1)


def _arranged(x: Tensor, blocks: Blocks, turned: bool = True, paired: bool = True) -> list[Tensor]:
    """What `arrange` makes of x, of both or one."""
    _, heads, size = x.shape
    shape = (heads, len(blocks.table), size, _BLOCK)
    out = [x.new_empty(shape) if wanted else None for wanted in (turned, paired)]
    arrange(heads, len(blocks.table), size, *_rows(x), blocks.table, *(0 if to is None else to for to in out))
    return [to for to in out if to is not None]
