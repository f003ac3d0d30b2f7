"""Loops that multiply with AMX: linear layers over any number of rows, and attention of new tokens.

Whoever wants them asks `tether.kernels.dispatch.multiplying_for`, which knows what the processor has.

Legend: N rows, E and O = width of what goes into a linear layer and of what comes out; R rows of one new token each, K
key/value heads, G query heads for each of them, D = head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray
from torch import Tensor

from tether.kernels.cpu.amx_instructions import (
    DEPTH,
    LINE,
    TILE,
    add_product,
    clear,
    configure,
    read,
    release,
    shapes_of,
    write,
)
from tether.kernels.cpu.avx512_instructions import fetch, side_by_side
from tether.kernels.cpu.elementwise import copy, finish, weigh
from tether.kernels.cpu.openmp_loop import (
    Loop,
    bfloat16s,
    float_of,
    inline,
    keep,
    pointer,
    rounded,
    share,
)

_BLOCK = 2 * TILE  # rows and columns of the sums that are held at once: four tiles, made of two and two
_ROWS_AT_ONCE = 256  # of x: they stay in the cache while a thread goes through its share of the weight
MOST_ROWS = 512
"""Rows over which the matrix library is faster."""
_CHUNK = 4 * TILE  # numbers of a value that are summed up at once, in four tiles


def can_multiply(width: int) -> bool:
    """Whether rows of so many numbers can be multiplied."""
    return width % DEPTH == 0


def can_attend(groups: int, size: int, value_size: int) -> bool:
    """Whether heads like these can be attended to."""
    return size % _CHUNK == value_size % _CHUNK == 0 and groups <= TILE


@inline
def _sums(x: Any, lower: Any, stride: Any, weight: Any, steps: Any, out: Any, ahead: Any, lines: Any) -> None:
    """Float32 sums [32, 32], to `out`, of 16 rows at `x` and 16 at `lower`; `lines` are fetched in each step."""
    clear(0)
    clear(1)
    clear(2)
    clear(3)
    for k in range(steps):
        read(4, x + LINE * k, stride)
        read(6, weight + 2048 * k, LINE)
        read(7, weight + 2048 * k + 1024, LINE)
        for line in range(lines):
            fetch(ahead + LINE * (lines * k + line))
        add_product(0, 4, 6)
        add_product(1, 4, 7)
        read(5, lower + LINE * k, stride)
        add_product(2, 5, 6)
        add_product(3, 5, 7)
    write(0, out, 128)
    write(1, out + 64, 128)
    write(2, out + 2048, 128)
    write(3, out + 2112, 128)


@Loop
def product(p: Any) -> None:
    """x [N, E], a packed weight, bias [O] -> out [N, O], with `other` [N, O] by the way; see `multiplied`.

    A thread has a share of the weight's blocks. While one is multiplied, the next is fetched.
    """
    a = carray(p, (10,))
    rows, width, outputs, what, x, weight, shapes = a[0], a[1], a[2], a[3], a[4], a[5], a[9]
    steps, configured = width // DEPTH, 0
    sums = np.empty((_BLOCK, _BLOCK), np.float32)
    place = sums.ctypes.data
    first, last = share((outputs + _BLOCK - 1) // _BLOCK)
    for upper in range(0, rows, _ROWS_AT_ONCE):
        end = min(upper + _ROWS_AT_ONCE, rows)
        times = (end - upper + _BLOCK - 1) // _BLOCK
        for block in range(first, last):
            column = block * _BLOCK
            columns = min(_BLOCK, outputs - column)
            bias = a[6] + 2 * column if a[6] != 0 else 0
            here = weight + 2048 * steps * block
            lines = (_BLOCK + times - 1) // times if block + 1 < last else 0
            for time in range(times):
                row = upper + time * _BLOCK
                count = min(_BLOCK, end - row)
                lower = row + TILE if count > TILE else row
                if count != configured:
                    configure(shapes + 64 * count)
                    configured = count
                ahead = here + 2048 * steps + LINE * lines * steps * time
                _sums(x + 2 * row * width, x + 2 * lower * width, 2 * width, here, steps, place, ahead, lines)
                for i in range(count):
                    at = 2 * ((row + i) * outputs + column)
                    finish(place + 128 * i, columns, bias, what, a[8] + at, a[7] + at)
    release()
    keep(sums)


def _shapes_of_rows(rows: int) -> Any:
    upper, lower = min(rows, TILE), rows - TILE if rows > TILE else rows
    return shapes_of(dict(enumerate((n, LINE) for n in (upper, upper, lower, lower, upper, lower, TILE, TILE))))


_PRODUCT_SHAPES = np.stack([_shapes_of_rows(rows) for rows in range(_BLOCK + 1)])


@Loop
def pack(p: Any) -> None:
    """A weight [O, E] -> blocks of 32 outputs, of steps of 32 numbers, of two tiles; after the last output zeros."""
    a = carray(p, (4,))
    outputs, pairs = a[0], a[1] // 2
    blocks, steps = (outputs + _BLOCK - 1) // _BLOCK, a[1] // DEPTH
    first, last = share(blocks * steps * 2)
    for tile in range(first, last):
        block, step, half = tile // 2 // steps, tile // 2 % steps, tile % 2
        to = carray(pointer(a[3] + 1024 * tile, np.uint32(0)), (TILE, TILE))
        for o in range(TILE):
            output = block * _BLOCK + half * TILE + o
            if output < outputs:
                of = carray(pointer(a[2] + 4 * (output * pairs + step * TILE), np.uint32(0)), (TILE,))
                for pair in range(TILE):
                    to[pair, o] = of[pair]
            else:
                for pair in range(TILE):
                    to[pair, o] = np.uint32(0)


def packed(weight: Tensor) -> Tensor:
    """A weight [O, E] as `multiplied` wants it; `can_multiply(E)`."""
    outputs, width = weight.shape
    tiles = weight.new_empty(-(-outputs // _BLOCK) * _BLOCK, width)
    pack(outputs, width, weight.contiguous(), tiles)
    return tiles


def multiplied(x: Tensor, weight: Tensor, outputs: int, bias: Tensor | None, what: int, other: Tensor | None) -> Tensor:
    """x [N, E] times a `packed` weight, plus bias [O], and what follows: [N, O].

    Args:
        x: bfloat16, as all of them.
        weight: from `packed`.
        outputs: O.
        bias: or None.
        what: ``PLAIN``, ``SILU``, ``TIMES`` or ``PLUS`` of `tether.kernels.cpu.elementwise`.
        other: [N, O], for the last two.
    """
    x, beside = x.contiguous(), 0 if other is None else other.contiguous()
    out = x.new_empty(len(x), outputs)
    numbers = (len(x), x.shape[1], outputs, what)
    product(*numbers, x, weight, 0 if bias is None else bias, out, beside, _PRODUCT_SHAPES.ctypes.data)
    return out


@inline
def _scores(keys: Any, size: Any, queries: Any, out: Any) -> None:
    """32 keys [32, D] times 16 queries [D / 2, 16], in pairs -> float32 [32, 16] to `out`."""
    clear(4)
    clear(5)
    for step in range(size // _CHUNK):
        here = keys + 2 * LINE * step
        read(0, here, 2 * size)
        read(1, here + LINE, 2 * size)
        read(2, here + 2 * TILE * size, 2 * size)
        read(3, here + 2 * TILE * size + LINE, 2 * size)
        read(6, queries + 2048 * step, LINE)
        read(7, queries + 2048 * step + 1024, LINE)
        add_product(4, 0, 6)
        add_product(5, 2, 6)
        add_product(4, 1, 7)
        add_product(5, 3, 7)
    write(4, out, LINE)
    write(5, out + 1024, LINE)


@inline
def _pair_up(values: Any, stride: Any, seen: Any, nothing: Any, pairs: Any, ahead: Any) -> None:
    """32 values of which a chunk is wanted -> [16, chunk]: those of two keys side by side, 0 for what is not seen."""
    for n in range(TILE):
        even, odd = values + 4 * n * stride, values + 4 * n * stride + 2 * stride
        side_by_side(even if 2 * n < seen else nothing, odd if 2 * n + 1 < seen else nothing, pairs + 4 * _CHUNK * n)
        even, odd = even + LINE, odd + LINE
        at = pairs + 4 * _CHUNK * n + 2 * LINE
        side_by_side(even if 2 * n < seen else nothing, odd if 2 * n + 1 < seen else nothing, at)
        fetch(even + ahead - LINE)
        fetch(even + ahead)
        fetch(odd + ahead - LINE)
        fetch(odd + ahead)


@inline
def _add_values(weights: Any, stride: Any, pairs: Any) -> None:
    """16 weighted sums of a chunk of 32 values, to those in the first four tiles."""
    read(4, weights, stride)
    read(5, pairs, 4 * _CHUNK)
    read(6, pairs + LINE, 4 * _CHUNK)
    read(7, pairs + 2 * LINE, 4 * _CHUNK)
    add_product(0, 4, 5)
    add_product(1, 4, 6)
    add_product(2, 4, 7)
    read(5, pairs + 3 * LINE, 4 * _CHUNK)
    add_product(3, 4, 5)


@Loop
def attend(p: Any) -> None:
    """As `tether.kernels.cpu.elementwise.attend`, where the cache has room for a multiple of 32 tokens.

    Keys and values are taken 32 at a time, from a multiple of 32 on, and weights are rounded before they meet the
    values. Meanwhile those of the next head are fetched, a few lines at a time: for many at once one would wait.
    """
    a = carray(p, (23,))
    rows, kv_heads, groups, size, value_size, capacity = a[0], a[1], a[2], a[3], a[4], a[5]
    scale, softcap, window = float_of(a[6]), float_of(a[7]), a[8]
    position = carray(pointer(a[9], np.int64(0)), (rows,))
    out = bfloat16s(a[12], (rows, kv_heads * groups, value_size))
    queries, columns = np.zeros((size // 2, TILE), np.uint32), np.empty((_BLOCK, TILE), np.float32)
    scores, weights = np.empty((groups, capacity + 4), np.float32), np.zeros((TILE, capacity), np.uint16)
    pairs, sums, nothing = np.empty((TILE, _CHUNK), np.uint32), np.empty((TILE, _CHUNK), np.float32), np.zeros(32)
    at_queries, at_columns, at_weights = queries.ctypes.data, columns.ctypes.data, weights.ctypes.data
    at_pairs, at_sums, at_nothing = pairs.ctypes.data, sums.ctypes.data, np.int64(nothing.ctypes.data)
    lines = (_BLOCK * size // (LINE // 2) + groups - 1) // groups  # of 32 keys, a query head's share
    configure(a[22])
    first, last = share(rows * kv_heads)
    for task in range(first, last):
        row, head = task // kv_heads, task % kv_heads
        keys, values = a[10] + 2 * task * capacity * size, a[11] + 2 * task * capacity * value_size
        here = position[row]
        start = max(0, here + 1 - window) if window > 0 else 0
        begin = start // _BLOCK * _BLOCK
        end = here + 1 - begin
        copy(a[16] + 2 * (row * a[17] + head * a[18]), size, keys + 2 * here * size)
        copy(a[19] + 2 * (row * a[20] + head * a[21]), value_size, values + 2 * here * value_size)
        for group in range(groups):
            query = a[13] + 2 * (row * a[14] + (head * groups + group) * a[15])
            of_query = carray(pointer(query, np.uint32(0)), (size // 2,))
            for pair in range(size // 2):
                queries[pair, group] = of_query[pair]
        for n in range(0, end, _BLOCK):
            _scores(keys + 2 * (begin + n) * size, size, at_queries, at_columns)
            for group in range(groups):
                to_scores = scores[group]
                for i in range(_BLOCK):
                    to_scores[n + i] = columns[i, group] * scale
                for line in range(group * lines, (group + 1) * lines):
                    fetch(keys + 2 * (capacity + begin + n) * size + LINE * line)
        for group in range(groups):
            weigh(scores[group], start - begin, end - (start - begin), softcap, weights[group])
        for chunk in range(0, value_size, _CHUNK):
            clear(0)
            clear(1)
            clear(2)
            clear(3)
            for n in range(0, end, _BLOCK):
                here_values, ahead = values + 2 * ((begin + n) * value_size + chunk), 2 * capacity * value_size
                _pair_up(here_values, value_size, end - n, at_nothing, at_pairs, ahead)
                _add_values(at_weights + 2 * n, 2 * capacity, at_pairs)
            write(0, at_sums, 4 * _CHUNK)
            write(1, at_sums + LINE, 4 * _CHUNK)
            write(2, at_sums + 2 * LINE, 4 * _CHUNK)
            write(3, at_sums + 3 * LINE, 4 * _CHUNK)
            for group in range(groups):
                of, to = sums[group], out[row, head * groups + group]
                for e in range(_CHUNK):
                    to[chunk + e] = rounded(of[e])
    release()
    keep(queries)
    keep(columns)
    keep(weights)
    keep(pairs)
    keep(sums)
    keep(nothing)


def attend_to(*arguments: int | float | Tensor) -> None:
    """`attend`, with the tiles' shapes."""
    attend(*arguments, _PRODUCT_SHAPES[-1].ctypes.data)
