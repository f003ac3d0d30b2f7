"""Loops that multiply with AVX-512: linear layers over any number of rows, and attention of new tokens.

Whoever wants them asks `tether.kernels.dispatch.multiplying_for`, which knows what the processor has. They are what
`tether.kernels.cpu.linear_amx` is to AMX.

Legend: N rows, E and O = width of what goes into a linear layer and of what comes out; R rows of one new token each, K
key/value heads, G query heads for each of them, D = head size.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import carray
from torch import Tensor

from tether.kernels.cpu.avx512_instructions import COLUMNS, add_products, fetch, side_by_side, transposed
from tether.kernels.cpu.elementwise import copy, finish, weigh
from tether.kernels.cpu.openmp_loop import Loop, bfloat16s, float_of, keep, pointer, rounded, share

_BLOCK = COLUMNS
_ROWS_AT_ONCE = 256  # of x: they stay in the cache while a thread goes through its share of the weight
MOST_ROWS = sys.maxsize
"""Rows over which the matrix library is faster: it never is."""


def can_multiply(width: int) -> bool:
    """Whether rows of so many numbers can be multiplied."""
    return width % _BLOCK == 0


def can_attend(groups: int, size: int, value_size: int) -> bool:
    """Whether heads like these can be attended to."""
    return size % _BLOCK == value_size % _BLOCK == 0


@Loop
def product(p: Any) -> None:
    """x [N, E], a packed weight, bias [O] -> out [N, O], with `other` [N, O] by the way; see `multiplied`."""
    a = carray(p, (9,))
    rows, width, outputs, what, x, weight, out, other = a[0], a[1], a[2], a[3], a[4], a[5], a[7], a[8]
    sums = np.empty((_ROWS_AT_ONCE, _BLOCK), np.float32)
    place = np.int64(sums.ctypes.data)
    first, last = share((outputs + _BLOCK - 1) // _BLOCK)
    for upper in range(0, rows, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, rows - upper)
        for block in range(first, last):
            column = block * _BLOCK
            columns, here = min(_BLOCK, outputs - column), weight + 2 * width * column
            bias = a[6] + 2 * column if a[6] != 0 else 0
            add_products(x + 2 * width * upper, 2 * width, count, here, width // 2, place, 4 * _BLOCK, 1)
            for i in range(count):
                at = 2 * ((upper + i) * outputs + column)
                finish(place + 4 * _BLOCK * i, columns, bias, what, other + at, out + at)
    keep(sums)


@Loop
def pack(p: Any) -> None:
    """A weight [O, E] -> blocks of 32 outputs as columns [E / 2, 32] of pairs; after the last output zeros."""
    a = carray(p, (4,))
    outputs, width, weight, out = a[0], a[1], a[2], a[3]
    zeros = np.zeros(_BLOCK, np.uint16)
    nothing = np.int64(zeros.ctypes.data)
    first, last = share((outputs + _BLOCK - 1) // _BLOCK)
    for block in range(first, last):
        for step in range(0, width, _BLOCK):
            for half in range(0, _BLOCK, 16):
                output = block * _BLOCK + half
                to = out + 2 * (_BLOCK * (block * width + step) + 2 * half)
                transposed(weight + 2 * (output * width + step), 2 * width, outputs - output, nothing, to)
    keep(zeros)


def packed(weight: Tensor) -> Tensor:
    """A weight [O, E] as `multiplied` wants it; `can_multiply(E)`."""
    outputs, width = weight.shape
    blocks = weight.new_empty(-(-outputs // _BLOCK) * _BLOCK, width)
    pack(outputs, width, weight.contiguous(), blocks)
    return blocks


def multiplied(x: Tensor, weight: Tensor, outputs: int, bias: Tensor | None, what: int, other: Tensor | None) -> Tensor:
    """x [N, E] times a `packed` weight, plus bias [O], and what follows: [N, O]. See
    `tether.kernels.cpu.linear_amx`.
    """
    x, beside = x.contiguous(), 0 if other is None else other.contiguous()
    out = x.new_empty(len(x), outputs)
    product(len(x), x.shape[1], outputs, what, x, weight, 0 if bias is None else bias, out, beside)
    return out


@Loop
def attend(p: Any) -> None:
    """As `tether.kernels.cpu.elementwise.attend`, where the cache has room for a multiple of 32 tokens.

    Keys and values are taken 32 at a time, from a multiple of 32 on, and weights are rounded before they meet the
    values.
    """
    a = carray(p, (22,))
    rows, kv_heads, groups, size, value_size, capacity = a[0], a[1], a[2], a[3], a[4], a[5]
    scale, softcap, window = float_of(a[6]), float_of(a[7]), a[8]
    position = carray(pointer(a[9], np.int64(0)), (rows,))
    out = bfloat16s(a[12], (rows, kv_heads * groups, value_size))
    scores, weights = np.empty((groups, capacity + 4), np.float32), np.empty((groups, capacity), np.uint16)
    block, sums = np.empty((max(size // 2, 16), _BLOCK), np.uint32), np.empty((groups, _BLOCK), np.float32)
    zeros = np.zeros(_BLOCK, np.uint16)
    to_scores, to_block, nothing = (
        np.int64(scores.ctypes.data),
        np.int64(block.ctypes.data),
        np.int64(zeros.ctypes.data),
    )
    first, last = share(rows * kv_heads)
    for task in range(first, last):
        row, head = task // kv_heads, task % kv_heads
        here = position[row]
        start = max(0, here + 1 - window) if window > 0 else 0
        begin = start // _BLOCK * _BLOCK
        end, before = here + 1 - begin, start - begin
        keys, values = a[10] + 2 * task * capacity * size, a[11] + 2 * task * capacity * value_size
        copy(a[16] + 2 * (row * a[17] + head * a[18]), size, keys + 2 * here * size)
        copy(a[19] + 2 * (row * a[20] + head * a[21]), value_size, values + 2 * here * value_size)
        query = a[13] + 2 * (row * a[14] + head * groups * a[15])
        for n in range(0, end, _BLOCK):
            of_keys = keys + 2 * (begin + n) * size
            for step in range(0, size, _BLOCK):
                for half in range(0, _BLOCK, 16):
                    to = to_block + 2 * (_BLOCK * step + 2 * half)
                    rows_of_keys = of_keys + 2 * (half * size + step)
                    transposed(rows_of_keys, 2 * size, end - n - half, nothing, to)
                    for i in range(16):
                        fetch(rows_of_keys + 2 * (capacity + i) * size)
            add_products(query, 2 * a[15], groups, to_block, size // 2, to_scores + 4 * n, 4 * (capacity + 4), 1)
        for group in range(groups):
            of = scores[group]
            for n in range(end):
                of[n] *= scale
            weigh(of, before, end - before, softcap, weights[group])
        for chunk in range(0, value_size, _BLOCK):
            for n in range(0, end, _BLOCK):
                for i in range(0, _BLOCK, 2):
                    even = values + 2 * ((begin + n + i) * value_size + chunk)
                    odd = even + 2 * value_size if n + i + 1 < end else nothing
                    side_by_side(even if n + i < end else nothing, odd, to_block + 64 * i)
                    fetch(even + 2 * capacity * value_size)
                    fetch(even + 2 * (capacity + 1) * value_size)
                of_block = np.int64(weights.ctypes.data) + 2 * n
                add_products(
                    of_block, 2 * capacity, groups, to_block, 16, np.int64(sums.ctypes.data), 4 * _BLOCK, n == 0
                )
            for group in range(groups):
                of, to = sums[group], out[row, head * groups + group]
                for e in range(_BLOCK):
                    to[chunk + e] = rounded(of[e])
    keep(scores)
    keep(weights)
    keep(block)
    keep(sums)
    keep(zeros)


def attend_to(*arguments: int | float | Tensor) -> None:
    """`attend`."""
    attend(*arguments)
