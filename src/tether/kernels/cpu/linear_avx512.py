"""Linear layers and attention of new tokens with AVX-512: the counterpart of `tether.kernels.cpu.linear_amx`.

Legend: N rows, E and O = width of the input and output of a linear layer; R rows of one new token each, K key/value
heads, G query heads per key/value head, D = head size.
"""

from __future__ import annotations

import sys
from typing import Annotated

import numpy as np
from torch import Tensor

from tether.kernels.cpu.avx512_instructions import COLUMNS, add_products, interleave, prefetch, transpose_pairs
from tether.kernels.cpu.decode_attention import Key, Keys, Out, Position, Query, Value, Values, attention_weights, copy
from tether.kernels.cpu.kernel_signature import bfloat16
from tether.kernels.cpu.linear_plain import finish
from tether.kernels.cpu.openmp_loop import address_of, keep_alive, kernel, rounded, share, tasks

_BLOCK = COLUMNS
_ROWS_AT_ONCE = 256  # rows of x that stay in the cache while a thread goes through its share of the weight
MAX_ROWS = sys.maxsize
"""Number of rows above which the matrix library is faster: it never is."""


def can_multiply(width: int) -> bool:
    """Return whether `linear` supports rows of this width."""
    return width % _BLOCK == 0


def can_attend(groups: int, size: int, value_size: int) -> bool:
    """Return whether `attend` supports heads of these sizes."""
    return size % _BLOCK == value_size % _BLOCK == 0


@kernel
def product(
    x: Annotated[int, bfloat16("rows", "width")],
    weight: Annotated[int, bfloat16("padded_outputs", "width")],
    out: Annotated[int, bfloat16("rows", "outputs")],
    bias: Annotated[int, bfloat16("outputs", optional=True)],
    other: Annotated[int, bfloat16("rows", "outputs", optional=True)],
    epilogue: int,
    rows: int,
    width: int,
    outputs: int,
) -> None:
    """Compute `linear`: each thread has a share of the weight's blocks."""
    sums = np.empty((_ROWS_AT_ONCE, _BLOCK), np.float32)
    at_sums = address_of(sums)
    first, last = share((outputs + _BLOCK - 1) // _BLOCK)
    for upper in range(0, rows, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, rows - upper)
        for block in range(first, last):
            column = block * _BLOCK
            columns, of_block = min(_BLOCK, outputs - column), weight + 2 * width * column
            of_bias = bias + 2 * column if bias != 0 else 0
            add_products(x + 2 * width * upper, 2 * width, count, of_block, width // 2, at_sums, 4 * _BLOCK, 1)
            for i in range(count):
                at = 2 * ((upper + i) * outputs + column)
                finish(at_sums + 4 * _BLOCK * i, columns, of_bias, epilogue, other + at, out + at)
    keep_alive((sums,))


@kernel
def pack(
    weight: Annotated[int, bfloat16("outputs", "width")],
    out: Annotated[int, bfloat16("padded_outputs", "width")],
    outputs: int,
    width: int,
    queue: int,
) -> None:
    """Pack a weight [O, E] into blocks of 32 outputs as columns [E / 2, 32] of pairs; missing outputs are zeros."""
    zeros = np.zeros(_BLOCK, np.uint16)
    at_zeros = address_of(zeros)
    for block in tasks(queue, (outputs + _BLOCK - 1) // _BLOCK):
        for step in range(0, width, _BLOCK):
            for half in range(0, _BLOCK, 16):
                output = block * _BLOCK + half
                to = out + 2 * (_BLOCK * (block * width + step) + 2 * half)
                transpose_pairs(weight + 2 * (output * width + step), 2 * width, outputs - output, at_zeros, to)
    keep_alive((zeros,))


def packed(weight: Tensor) -> Tensor:
    """Return a weight [O, E] packed for `linear`; requires `can_multiply(E)`."""
    outputs, width = weight.shape
    out = weight.new_empty(-(-outputs // _BLOCK) * _BLOCK, width)
    pack(weight=weight.contiguous(), out=out)
    return out


def linear(x: Tensor, weight: Tensor, outputs: int, bias: Tensor | None, epilogue: int, other: Tensor | None) -> Tensor:
    """Return [N, O] with the arguments of `tether.kernels.cpu.linear_amx.linear`."""
    out, other = x.new_empty(len(x), outputs), None if other is None else other.contiguous()
    product(x=x.contiguous(), weight=weight, out=out, bias=bias, other=other, epilogue=epilogue)
    return out


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
    """Attend as `tether.kernels.cpu.decode_attention.attend` does; the capacity of the cache is a multiple of 32
    tokens.

    Keys and values are read 32 at a time, starting at a multiple of 32, and weights are rounded before they are
    multiplied with the values.
    """
    groups = heads // kv_heads
    scores, weights = np.empty((groups, capacity + 4), np.float32), np.empty((groups, capacity), np.uint16)
    block, sums = np.empty((max(size // 2, 16), _BLOCK), np.uint32), np.empty((groups, _BLOCK), np.float32)
    zeros = np.zeros(_BLOCK, np.uint16)
    at_scores, at_block, at_zeros = address_of(scores), address_of(block), address_of(zeros)
    first, last = share(rows * kv_heads)
    for task in range(first, last):
        row, head = task // kv_heads, task % kv_heads
        newest = position[row]
        start = max(0, newest + 1 - window) if window > 0 else 0
        begin = start // _BLOCK * _BLOCK
        end, before = newest + 1 - begin, start - begin
        row_keys, row_values = keys + 2 * task * capacity * size, values + 2 * task * capacity * value_size
        copy(key + 2 * (row * key_row + head * key_head), size, row_keys + 2 * newest * size)
        copy(value + 2 * (row * value_row + head * value_head), value_size, row_values + 2 * newest * value_size)
        row_query = query + 2 * (row * query_row + head * groups * query_head)
        for n in range(0, end, _BLOCK):
            block_keys = row_keys + 2 * (begin + n) * size
            for step in range(0, size, _BLOCK):
                for half in range(0, _BLOCK, 16):
                    to = at_block + 2 * (_BLOCK * step + 2 * half)
                    half_keys = block_keys + 2 * (half * size + step)
                    transpose_pairs(half_keys, 2 * size, end - n - half, at_zeros, to)
                    for i in range(16):
                        prefetch(half_keys + 2 * (capacity + i) * size)
            to = at_scores + 4 * n
            add_products(row_query, 2 * query_head, groups, at_block, size // 2, to, 4 * (capacity + 4), 1)
        for group in range(groups):
            of = scores[group]
            for n in range(end):
                of[n] *= scale
            attention_weights(of, before, end - before, softcap, weights[group])
        for chunk in range(0, value_size, _BLOCK):
            for n in range(0, end, _BLOCK):
                for i in range(0, _BLOCK, 2):
                    even = row_values + 2 * ((begin + n + i) * value_size + chunk)
                    odd = even + 2 * value_size if n + i + 1 < end else at_zeros
                    interleave(even if n + i < end else at_zeros, odd, at_block + 64 * i)
                    prefetch(even + 2 * capacity * value_size)
                    prefetch(even + 2 * (capacity + 1) * value_size)
                block_weights = address_of(weights) + 2 * n
                to = address_of(sums)
                add_products(block_weights, 2 * capacity, groups, at_block, 16, to, 4 * _BLOCK, n == 0)
            for group in range(groups):
                of, to_head = sums[group], out[row, head * groups + group]
                for e in range(_BLOCK):
                    to_head[chunk + e] = rounded(of[e])
    keep_alive((scores, weights, block, sums, zeros))
