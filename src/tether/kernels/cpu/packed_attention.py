"""Attention over packed segments in compiled kernels: no padding, no repeated prompts, and its own backward pass.

The tokens of a segment are processed in blocks of 32; a task is one block of one head. Products read their right-hand
side in an order that `arrange` prepares: *transposed*, with tokens as columns, or *interleaved*, to be summed over
tokens.

With P = softmax(scale Q K^T) over what a query sees and dO the gradient of the output (Dao et al., "FlashAttention",
2022, appendix B.2)::

    O = P V    dV = P^T dO    dS = P * (dO V^T - rowsum(P * dO V^T))    dQ = scale dS K    dK = scale dS^T Q

A softcap c (Gemma 2) turns scores s into c tanh(s / c), and multiplies dS with 1 - tanh(s / c)^2. Products take
bfloat16 numbers and sum in float32; P and dS are rounded between two products. Each number is summed by one thread, in
an order that neither the number of threads nor the other segments change.

Legend: N tokens, B blocks, K key/value heads, H = K * G query heads, D and E = head size of keys and of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tether.kernels.causal_attention import AttentionSpec
from tether.kernels.cpu.attention_blocks import (
    CONTINUATIONS_START,
    FIELDS,
    FIRST_TOKEN,
    NUM_CONTINUATIONS,
    NUM_TOKENS,
    POSITION,
    PREFIX_START,
    PREFIX_TOKENS,
    SEGMENT_END,
    SEGMENT_START,
    Blocks,
    blocks_of,
)
from tether.kernels.cpu.avx512_instructions import COLUMNS, add_products, interleave, transpose_pairs
from tether.kernels.cpu.kernel_signature import BFloat16s, Floats, Ints, bfloat16, float32, int64
from tether.kernels.cpu.openmp_loop import (
    address_of,
    array_bfloat16,
    capped,
    exp,
    f32,
    inline,
    keep_alive,
    kernel,
    rounded,
    tasks,
)
from tether.types import AutogradContext

_BLOCK = COLUMNS
_MASKED = np.float32(-1e30)
Table = Annotated[Ints, int64("blocks", FIELDS)]
Query = Annotated[int, bfloat16("tokens", "heads", "size", strides=("query_token", "query_head"))]
Key = Annotated[int, bfloat16("tokens", "kv_heads", "size", strides=("key_token", "key_head"))]
Value = Annotated[int, bfloat16("tokens", "kv_heads", "value_size", strides=("value_token", "value_head"))]
KeyColumns = Annotated[int, bfloat16("kv_heads", "blocks", "size", _BLOCK)]
ValueColumns = Annotated[int, bfloat16("kv_heads", "blocks", "value_size", _BLOCK)]
PerQuery = Annotated[Floats, float32("heads", "blocks", _BLOCK)]


@kernel
def arrange(
    x: Annotated[int, bfloat16("tokens", "heads", "size", strides=("token_stride", "head_stride"))],
    table: Table,
    transposed: Annotated[int, bfloat16("heads", "blocks", "size", _BLOCK, optional=True)],
    interleaved: Annotated[int, bfloat16("heads", "blocks", "size", _BLOCK, optional=True)],
    heads: int,
    blocks: int,
    size: int,
    token_stride: int,
    head_stride: int,
    queue: int,
) -> None:
    """Reorder x [N, heads, D] into `transposed` [heads, B, D / 2, 32] or `interleaved` [heads, D / 32, 16 B, 32] or
    both.

    Both consist of pairs of numbers: transposed pairs are two numbers of a token, with the tokens of a block as
    columns; interleaved pairs are the same number of two consecutive tokens. The end of a block's last tokens is filled
    with zeros.
    """
    zeros = np.zeros(_BLOCK, np.uint16)
    at_zeros = address_of(zeros)
    for task in tasks(queue, heads * blocks):
        head, block = task // blocks, task % blocks
        count, row = table[block, NUM_TOKENS], x + 2 * (table[block, FIRST_TOKEN] * token_stride + head * head_stride)
        for chunk in range(0, size, _BLOCK):
            if transposed != 0:
                for i in range(0, _BLOCK, 16):
                    to = transposed + 2 * _BLOCK * (size * task + chunk) + 4 * i
                    transpose_pairs(row + 2 * (i * token_stride + chunk), 2 * token_stride, count - i, at_zeros, to)
            if interleaved != 0:
                to = interleaved + 2 * _BLOCK * ((head * size + chunk) * blocks + _BLOCK * block)
                for i in range(0, _BLOCK, 2):
                    even = row + 2 * (i * token_stride + chunk)
                    odd = even + 2 * token_stride
                    interleave(even if i < count else at_zeros, odd if i + 1 < count else at_zeros, to + 64 * i)
    keep_alive((zeros,))


@inline
def _padded(tokens: int) -> int:
    """Round a number of tokens up to full blocks."""
    return (tokens + _BLOCK - 1) // _BLOCK * _BLOCK


@inline
def _scores(x: int, stride: int, block: Ints, before: int, columns: int, keys: int, pairs: int, out: Floats) -> None:
    """Multiply a block's rows with all transposed keys that it may see, of which the first `before` are the
    prefix's."""
    for column in range(0, columns, _BLOCK):
        in_segment = column - before
        at = block[SEGMENT_START] + in_segment // _BLOCK if in_segment >= 0 else block[PREFIX_START] + column // _BLOCK
        to = address_of(out) + 4 * column
        add_products(x, stride, block[NUM_TOKENS], keys + 4 * _BLOCK * pairs * at, pairs, to, 4 * out.shape[1], 1)


@inline
def _weighted_sums(weights: BFloat16s, block: Ints, before: int, columns: int, values: int, out: int) -> None:
    """Multiply weights of a block's rows with interleaved values: sums [32, 32] at `out`, one row for each token of the
    block."""
    stride, at, rows = 2 * weights.shape[1], address_of(weights), block[NUM_TOKENS]
    if before > 0:
        add_products(at, stride, rows, values + 64 * _BLOCK * block[PREFIX_START], before // 2, out, 4 * _BLOCK, 1)
    segment_values, is_new = values + 64 * _BLOCK * block[SEGMENT_START], 1 if before == 0 else 0
    add_products(at + 2 * before, stride, rows, segment_values, (columns - before) // 2, out, 4 * _BLOCK, is_new)


@inline
def _mask(scores: Floats, position: int, before: int, prefix: int, columns: int, window: int) -> None:
    """Mask what the query at a position of its segment does not see: later tokens, tokens outside the window, and
    padding."""
    first = max(0, prefix + position + 1 - window) if window > 0 else 0
    for n in range(min(first, prefix)):
        scores[n] = _MASKED
    for n in range(prefix, before + max(0, first - prefix)):
        scores[n] = _MASKED
    for n in range(before + position + 1, columns):
        scores[n] = _MASKED


@inline
def _scale(scores: Floats, scale: float, softcap: float) -> None:
    if softcap > 0:
        for n in range(len(scores)):
            scores[n] = capped(scores[n] * scale, softcap)
    else:
        for n in range(len(scores)):
            scores[n] *= scale


@inline
def _slope(capped: float, softcap: float) -> float:
    """Return the derivative of a capped score with respect to the score."""
    return f32(1) if softcap == 0 else f32(1) - (capped / softcap) * (capped / softcap)


@inline
def _largest(scores: Floats, tops: Floats) -> float:
    """Return the maximum of full blocks of scores; it may be NaN where a score is."""
    for i in range(_BLOCK):
        tops[i] = scores[i]
    for n in range(_BLOCK, len(scores), _BLOCK):
        for i in range(_BLOCK):
            tops[i] = scores[n + i] if scores[n + i] > tops[i] else tops[i]
    largest = tops[0]
    for i in range(1, _BLOCK):
        largest = tops[i] if tops[i] > largest else largest
    return largest


@kernel
def attend(
    query: Query,
    key_columns: KeyColumns,
    values: ValueColumns,
    table: Table,
    out: Annotated[int, bfloat16("tokens", "heads", "value_size")],
    log_sum: PerQuery,
    longest: int,
    scale: float,
    softcap: float,
    window: int,
    blocks: int,
    heads: int,
    kv_heads: int,
    size: int,
    value_size: int,
    query_token: int,
    query_head: int,
    queue: int,
) -> None:
    """Compute out [N, H, E] and log_sum [H, B, 32] from query [N, H, D], transposed keys and interleaved values."""
    groups = heads // kv_heads
    scores, weights = np.empty((_BLOCK, longest), np.float32), np.empty((_BLOCK, longest), np.uint16)
    sums, tops, masses = np.empty((_BLOCK, _BLOCK), np.float32), np.empty(_BLOCK, np.float32), np.empty(_BLOCK)
    for task in tasks(queue, heads * blocks):
        head, number = task // blocks, task % blocks
        kv_head, block = head // groups, table[number]
        before = _padded(block[PREFIX_TOKENS])
        columns = before + block[POSITION] + _BLOCK
        rows = query + 2 * (block[FIRST_TOKEN] * query_token + head * query_head)
        keys = key_columns + 2 * _BLOCK * size * blocks * kv_head
        _scores(rows, 2 * query_token, block, before, columns, keys, size // 2, scores)
        for i in range(_BLOCK):
            log_sum[head, number, i] = f32(0)
        for i in range(block[NUM_TOKENS]):
            of, to, total = scores[i, :columns], weights[i], f32(0)
            _scale(of, scale, softcap)
            _mask(of, block[POSITION] + i, before, block[PREFIX_TOKENS], columns, window)
            largest = _largest(of, tops)
            for n in range(columns):
                e = exp(of[n] - largest)
                total += e
                to[n] = rounded(e)
            masses[i] = total
            log_sum[head, number, i] = largest + np.log(total)
        for chunk in range(0, value_size, _BLOCK):
            of_values = values + 2 * _BLOCK * blocks * (kv_head * value_size + chunk)
            _weighted_sums(weights, block, before, columns, of_values, address_of(sums))
            for i in range(block[NUM_TOKENS]):
                at = ((block[FIRST_TOKEN] + i) * heads + head) * value_size + chunk
                to, of, factor = array_bfloat16(out + 2 * at, (_BLOCK,)), sums[i], f32(1 / masses[i])
                for e in range(_BLOCK):
                    to[e] = rounded(of[e] * factor)
    keep_alive((scores, weights, sums))


@kernel
def query_backward(
    query: Query,
    grad: Annotated[int, bfloat16("tokens", "heads", "value_size")],
    key_columns: KeyColumns,
    keys: KeyColumns,
    value_columns: ValueColumns,
    table: Table,
    grad_query: Annotated[int, bfloat16("tokens", "heads", "size")],
    log_sum: PerQuery,
    mean_grad: PerQuery,
    longest: int,
    scale: float,
    softcap: float,
    window: int,
    blocks: int,
    heads: int,
    kv_heads: int,
    size: int,
    value_size: int,
    query_token: int,
    query_head: int,
    queue: int,
) -> None:
    """Compute grad_query and `mean_grad` [H, B, 32], which is rowsum(P * dO V^T).

    Inputs are those of `attend`, with keys in both orders, transposed values, and grad [N, H, E].
    """
    groups = heads // kv_heads
    scores, grads = np.empty((_BLOCK, longest), np.float32), np.empty((_BLOCK, longest), np.float32)
    changes, sums = np.empty((_BLOCK, longest), np.uint16), np.empty((_BLOCK, _BLOCK), np.float32)
    for task in tasks(queue, heads * blocks):
        head, number = task // blocks, task % blocks
        kv_head, block = head // groups, table[number]
        before = _padded(block[PREFIX_TOKENS])
        columns = before + block[POSITION] + _BLOCK
        rows = query + 2 * (block[FIRST_TOKEN] * query_token + head * query_head)
        of_keys = key_columns + 2 * _BLOCK * size * blocks * kv_head
        _scores(rows, 2 * query_token, block, before, columns, of_keys, size // 2, scores)
        rows = grad + 2 * (block[FIRST_TOKEN] * heads + head) * value_size
        of_values = value_columns + 2 * _BLOCK * value_size * blocks * kv_head
        _scores(rows, 2 * heads * value_size, block, before, columns, of_values, value_size // 2, grads)
        for i in range(_BLOCK):
            mean_grad[head, number, i] = f32(0)
        for i in range(block[NUM_TOKENS]):
            of, back, to, total, mean = scores[i, :columns], grads[i], changes[i], log_sum[head, number, i], f32(0)
            _scale(of, scale, softcap)
            _mask(of, block[POSITION] + i, before, block[PREFIX_TOKENS], columns, window)
            for n in range(columns):
                mean += exp(of[n] - total) * back[n]
            mean_grad[head, number, i] = mean
            for n in range(columns):
                weight = exp(of[n] - total)
                to[n] = rounded(weight * (back[n] - mean) * _slope(of[n], softcap) if weight > 0 else f32(0))
        for chunk in range(0, size, _BLOCK):
            of_keys = keys + 2 * _BLOCK * blocks * (kv_head * size + chunk)
            _weighted_sums(changes, block, before, columns, of_keys, address_of(sums))
            for i in range(block[NUM_TOKENS]):
                at = ((block[FIRST_TOKEN] + i) * heads + head) * size + chunk
                to, sums_of_row = array_bfloat16(grad_query + 2 * at, (_BLOCK,)), sums[i]
                for d in range(_BLOCK):
                    to[d] = rounded(sums_of_row[d] * scale)
    keep_alive((scores, grads, changes, sums))


@inline
def _add_weighted(
    weights: BFloat16s, count: int, x: int, size: int, blocks: int, head: int, block: int, sums: Floats
) -> None:
    """Add to sums [32, size] of `count` keys the interleaved rows x of a block of 32 queries, times their weights."""
    for chunk in range(0, size, _BLOCK):
        columns = x + 2 * _BLOCK * ((head * size + chunk) * blocks + _BLOCK * block)
        to = address_of(sums) + 4 * chunk
        add_products(address_of(weights), 2 * _BLOCK, count, columns, _BLOCK // 2, to, 4 * size, 0)


@inline
def _write(sums: Floats, block: Ints, factor: float, kv_heads: int, kv_head: int, out: int) -> None:
    """Write sums [32, size] times a factor to the block's tokens and one head of `out` [N, K, size]."""
    size = sums.shape[1]
    for i in range(block[NUM_TOKENS]):
        to = array_bfloat16(out + 2 * ((block[FIRST_TOKEN] + i) * kv_heads + kv_head) * size, (size,))
        of = sums[i]
        for d in range(size):
            to[d] = rounded(of[d] * factor)


@kernel
def key_value_backward(
    key: Key,
    value: Value,
    query_columns: Annotated[int, bfloat16("heads", "blocks", "size", _BLOCK)],
    queries: Annotated[int, bfloat16("heads", "blocks", "size", _BLOCK)],
    grad_columns: Annotated[int, bfloat16("heads", "blocks", "value_size", _BLOCK)],
    grads: Annotated[int, bfloat16("heads", "blocks", "value_size", _BLOCK)],
    table: Table,
    continuations: Annotated[Ints, int64("num_continuations")],
    log_sum: PerQuery,
    mean_grad: PerQuery,
    grad_key: Annotated[int, bfloat16("tokens", "kv_heads", "size")],
    grad_value: Annotated[int, bfloat16("tokens", "kv_heads", "value_size")],
    scale: float,
    softcap: float,
    window: int,
    blocks: int,
    heads: int,
    kv_heads: int,
    size: int,
    value_size: int,
    key_token: int,
    key_head: int,
    value_token: int,
    value_head: int,
    queue: int,
) -> None:
    """Compute grad_key and grad_value from key [N, K, D], value [N, K, E], and queries and grad in both orders.

    A task is a block of keys, which adds up the contributions of all blocks of queries that see it.
    """
    groups = heads // kv_heads
    scores, weight_grads = np.empty((_BLOCK, _BLOCK), np.float32), np.empty((_BLOCK, _BLOCK), np.float32)
    weights, changes = np.empty((_BLOCK, _BLOCK), np.uint16), np.empty((_BLOCK, _BLOCK), np.uint16)
    of_key, of_value = np.empty((_BLOCK, size), np.float32), np.empty((_BLOCK, value_size), np.float32)
    at_scores, at_grads = address_of(scores), address_of(weight_grads)
    for task in tasks(queue, kv_heads * blocks):
        kv_head, block = task // blocks, table[task % blocks]
        count = block[NUM_TOKENS]
        of_keys = key + 2 * (block[FIRST_TOKEN] * key_token + kv_head * key_head)
        of_values = value + 2 * (block[FIRST_TOKEN] * value_token + kv_head * value_head)
        of_key[:] = f32(0)
        of_value[:] = f32(0)
        num_own = block[SEGMENT_END] - task % blocks
        seeing = num_own + block[NUM_CONTINUATIONS]
        for step in range(groups * seeing):
            head, n = kv_head * groups + step // seeing, step % seeing
            seen_by = task % blocks + n if n < num_own else continuations[block[CONTINUATIONS_START] + n - num_own]
            at = 2 * _BLOCK * (head * blocks + seen_by)
            add_products(of_keys, 2 * key_token, count, query_columns + at * size, size // 2, at_scores, 4 * _BLOCK, 1)
            columns = grad_columns + at * value_size
            add_products(of_values, 2 * value_token, count, columns, value_size // 2, at_grads, 4 * _BLOCK, 1)
            totals, means = log_sum[head, seen_by], mean_grad[head, seen_by]
            is_own = table[seen_by, SEGMENT_START] == block[SEGMENT_START]
            distance = table[seen_by, POSITION] - block[POSITION] + (0 if is_own else table[seen_by, PREFIX_TOKENS])
            for i in range(count):
                of, back, to, to_change = scores[i], weight_grads[i], weights[i], changes[i]
                _scale(of, scale, softcap)
                for j in range(_BLOCK):
                    far = distance + j - i
                    is_seen = far >= 0 and (window == 0 or far < window)
                    weight = exp(of[j] - totals[j]) if is_seen else f32(0)
                    to[j] = rounded(weight)
                    to_change[j] = rounded(weight * (back[j] - means[j]) * _slope(of[j], softcap))
            _add_weighted(changes, count, queries, size, blocks, head, seen_by, of_key)
            _add_weighted(weights, count, grads, value_size, blocks, head, seen_by, of_value)
        _write(of_key, block, scale, kv_heads, kv_head, grad_key)
        _write(of_value, block, f32(1), kv_heads, kv_head, grad_value)
    keep_alive((scores, weight_grads, weights, changes, of_key, of_value))


def can_attend(size: int, value_size: int) -> bool:
    """Return whether `attention` supports heads of these sizes."""
    return size % COLUMNS == value_size % COLUMNS == 0


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    prefixes: Sequence[int | None] | None,
    spec: AttentionSpec,
) -> Tensor:
    """Return causal attention of packed segments with the layer's window and softcap; requires `can_attend`.

    Args:
        query: [N, H, D] bfloat16, of any strides but the last.
        key: [N, K, D].
        value: [N, K, E].
        lengths: those of `tether.text.models.layers.Packed`.
        prefixes: those of `tether.text.models.layers.Packed`.
        spec: settings of the layer.

    Returns:
        [N, H, E].
    """
    blocks = blocks_of(tuple(lengths), None if prefixes is None else tuple(prefixes))
    attended: Tensor = _Attention.apply(query, key, value, blocks, spec)
    return attended


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, spec: AttentionSpec
    ) -> Tensor:
        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
        out = query.new_empty(*query.shape[:2], value.shape[2])
        log_sum = query.new_empty(query.shape[1], len(blocks.table), _BLOCK, dtype=torch.float32)
        attend(
            query=query,
            table=blocks.table,
            out=out,
            log_sum=log_sum,
            longest=blocks.longest,
            **_arranged(key, blocks, transposed="key_columns"),
            **_arranged(value, blocks, interleaved="values"),
            **_numbers(spec),
        )
        ctx.save_for_backward(query, key, value, log_sum)
        ctx.blocks, ctx.spec = blocks, spec
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, log_sum = ctx.saved_tensors
        blocks, grad = ctx.blocks, grad.contiguous()
        grad_query, grad_key, grad_value = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
        )
        shared = {"table": blocks.table, "log_sum": log_sum, "mean_grad": torch.empty_like(log_sum)}
        shared |= _numbers(ctx.spec)
        query_backward(
            query=query,
            grad=grad,
            grad_query=grad_query,
            longest=blocks.longest,
            **_arranged(key, blocks, transposed="key_columns", interleaved="keys"),
            **_arranged(value, blocks, transposed="value_columns"),
            **shared,
        )
        key_value_backward(
            key=key,
            value=value,
            continuations=blocks.continuations,
            grad_key=grad_key,
            grad_value=grad_value,
            **_arranged(query, blocks, transposed="query_columns", interleaved="queries"),
            **_arranged(grad, blocks, transposed="grad_columns", interleaved="grads"),
            **shared,
        )
        return grad_query, grad_key, grad_value, None, None


def _numbers(spec: AttentionSpec) -> dict[str, float]:
    return {"scale": spec.scale, "softcap": spec.softcap or 0.0, "window": spec.sliding_window or 0}


def _arranged(
    x: Tensor, blocks: Blocks, transposed: str | None = None, interleaved: str | None = None
) -> dict[str, Tensor]:
    """Run `arrange` and return the requested orders under their names."""
    shape = (x.shape[1], len(blocks.table), x.shape[2], _BLOCK)
    tensors = {name: x.new_empty(shape) for name in (transposed, interleaved) if name}
    orders = {"transposed": transposed, "interleaved": interleaved}
    arrange(x=x, table=blocks.table, **{order: tensors.get(name or "") for order, name in orders.items()})
    return tensors
