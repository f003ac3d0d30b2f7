"""Linear layers over any number of rows, and attention of new tokens, with AMX.

Legend: N rows, E and O = width of the input and output of a linear layer; R rows of one new token each, K key/value
heads, G query heads per key/value head, D = head size.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tether.kernels.cpu.amx_instructions import (
    DEPTH,
    LINE,
    TILE,
    add_tile_product,
    clear_tile,
    configure_tiles,
    load_tile,
    release_tiles,
    shapes_of,
    store_tile,
)
from tether.kernels.cpu.avx512_instructions import interleave, prefetch
from tether.kernels.cpu.decode_attention import Key, Keys, Out, Position, Query, Value, Values, attention_weights, copy
from tether.kernels.cpu.kernel_signature import bfloat16, uint8
from tether.kernels.cpu.linear_plain import finish
from tether.kernels.cpu.openmp_loop import (
    address_of,
    array_uint32,
    inline,
    keep_alive,
    kernel,
    rounded,
    share,
    tasks,
)

_BLOCK = 2 * TILE  # rows and columns of the sums in registers: four tiles, from two tiles of rows and two of columns
_ROWS_AT_ONCE = 256  # rows of x that stay in the cache while a thread goes through its share of the weight
MAX_ROWS = 512
"""Number of rows above which the matrix library is faster."""
_CHUNK = 4 * TILE  # numbers of a value that are summed at once, in four tiles


def can_multiply(width: int) -> bool:
    """Return whether `linear` supports rows of this width."""
    return width % DEPTH == 0


def can_attend(groups: int, size: int, value_size: int) -> bool:
    """Return whether `attend` supports heads of these sizes."""
    return size % _CHUNK == value_size % _CHUNK == 0 and groups <= TILE


@inline
def _sums(x: int, lower: int, stride: int, weight: int, steps: int, out: int, ahead: int, lines: int) -> None:
    """Compute float32 sums [32, 32] at `out` from 16 rows at `x` and 16 at `lower`; each step prefetches `lines` at
    `ahead`."""
    clear_tile(0)
    clear_tile(1)
    clear_tile(2)
    clear_tile(3)
    for k in range(steps):
        load_tile(4, x + LINE * k, stride)
        load_tile(6, weight + 2048 * k, LINE)
        load_tile(7, weight + 2048 * k + 1024, LINE)
        for line in range(lines):
            prefetch(ahead + LINE * (lines * k + line))
        add_tile_product(0, 4, 6)
        add_tile_product(1, 4, 7)
        load_tile(5, lower + LINE * k, stride)
        add_tile_product(2, 5, 6)
        add_tile_product(3, 5, 7)
    store_tile(0, out, 128)
    store_tile(1, out + 64, 128)
    store_tile(2, out + 2048, 128)
    store_tile(3, out + 2112, 128)


@kernel
def product(
    x: Annotated[int, bfloat16("rows", "width")],
    weight: Annotated[int, bfloat16("padded_outputs", "width")],
    out: Annotated[int, bfloat16("rows", "outputs")],
    bias: Annotated[int, bfloat16("outputs", optional=True)],
    other: Annotated[int, bfloat16("rows", "outputs", optional=True)],
    tile_shapes: Annotated[int, uint8(_BLOCK + 1, 64)],
    epilogue: int,
    rows: int,
    width: int,
    outputs: int,
) -> None:
    """Compute `linear`: each thread has a share of the weight's blocks and prefetches the next one while it
    multiplies."""
    steps, configured = width // DEPTH, 0
    sums = np.empty((_BLOCK, _BLOCK), np.float32)
    at_sums = address_of(sums)
    first, last = share((outputs + _BLOCK - 1) // _BLOCK)
    for upper in range(0, rows, _ROWS_AT_ONCE):
        end = min(upper + _ROWS_AT_ONCE, rows)
        times = (end - upper + _BLOCK - 1) // _BLOCK
        for block in range(first, last):
            column = block * _BLOCK
            columns = min(_BLOCK, outputs - column)
            of_bias = bias + 2 * column if bias != 0 else 0
            of_block = weight + 2048 * steps * block
            lines = (_BLOCK + times - 1) // times if block + 1 < last else 0
            for time in range(times):
                row = upper + time * _BLOCK
                count = min(_BLOCK, end - row)
                lower = row + TILE if count > TILE else row
                if count != configured:
                    configure_tiles(tile_shapes + 64 * count)
                    configured = count
                ahead = of_block + 2048 * steps + LINE * lines * steps * time
                _sums(x + 2 * row * width, x + 2 * lower * width, 2 * width, of_block, steps, at_sums, ahead, lines)
                for i in range(count):
                    at = 2 * ((row + i) * outputs + column)
                    finish(at_sums + 128 * i, columns, of_bias, epilogue, other + at, out + at)
    release_tiles()
    keep_alive((sums,))


def _shapes_of_rows(rows: int) -> NDArray[np.uint8]:
    upper, lower = min(rows, TILE), rows - TILE if rows > TILE else rows
    return shapes_of(dict(enumerate((n, LINE) for n in (upper, upper, lower, lower, upper, lower, TILE, TILE))))


_TILE_SHAPES = torch.from_numpy(np.stack([_shapes_of_rows(rows) for rows in range(_BLOCK + 1)]))
"""The tile shapes for each number of rows in a block."""


@kernel
def pack(
    weight: Annotated[int, bfloat16("outputs", "width")],
    out: Annotated[int, bfloat16("padded_outputs", "width")],
    outputs: int,
    width: int,
    queue: int,
) -> None:
    """Pack a weight [O, E] into blocks of 32 outputs, each in steps of 32 numbers and two tiles; missing outputs are
    zeros."""
    pairs = width // 2
    blocks, steps = (outputs + _BLOCK - 1) // _BLOCK, width // DEPTH
    for tile in tasks(queue, blocks * steps * 2):
        block, step, half = tile // 2 // steps, tile // 2 % steps, tile % 2
        to = array_uint32(out + 1024 * tile, (TILE, TILE))
        for o in range(TILE):
            output = block * _BLOCK + half * TILE + o
            if output < outputs:
                of = array_uint32(weight + 4 * (output * pairs + step * TILE), (TILE,))
                for pair in range(TILE):
                    to[pair, o] = of[pair]
            else:
                for pair in range(TILE):
                    to[pair, o] = np.uint32(0)


def packed(weight: Tensor) -> Tensor:
    """Return a weight [O, E] packed for `linear`; requires `can_multiply(E)`."""
    outputs, width = weight.shape
    out = weight.new_empty(-(-outputs // _BLOCK) * _BLOCK, width)
    pack(weight=weight.contiguous(), out=out)
    return out


def linear(x: Tensor, weight: Tensor, outputs: int, bias: Tensor | None, epilogue: int, other: Tensor | None) -> Tensor:
    """Return [N, O]: x [N, E] times a `packed` weight, plus bias [O], after the epilogue.

    Args:
        x: bfloat16, as all tensors here.
        weight: from `packed`.
        outputs: O.
        bias: [O] or None.
        epilogue: ``PLAIN``, ``SILU``, ``TIMES`` or ``PLUS`` of `tether.kernels.cpu.linear_plain`.
        other: [N, O], for the last two.
    """
    out, other = x.new_empty(len(x), outputs), None if other is None else other.contiguous()
    tensors = {"x": x.contiguous(), "weight": weight, "out": out, "bias": bias, "other": other}
    product(**tensors, tile_shapes=_TILE_SHAPES, epilogue=epilogue)
    return out


@inline
def _scores(keys: int, size: int, queries: int, out: int) -> None:
    """Multiply 32 keys [32, D] with 16 queries [D / 2, 16], stored in pairs, and write float32 [32, 16] to `out`."""
    clear_tile(4)
    clear_tile(5)
    for step in range(size // _CHUNK):
        chunk = keys + 2 * LINE * step
        load_tile(0, chunk, 2 * size)
        load_tile(1, chunk + LINE, 2 * size)
        load_tile(2, chunk + 2 * TILE * size, 2 * size)
        load_tile(3, chunk + 2 * TILE * size + LINE, 2 * size)
        load_tile(6, queries + 2048 * step, LINE)
        load_tile(7, queries + 2048 * step + 1024, LINE)
        add_tile_product(4, 0, 6)
        add_tile_product(5, 2, 6)
        add_tile_product(4, 1, 7)
        add_tile_product(5, 3, 7)
    store_tile(4, out, LINE)
    store_tile(5, out + 1024, LINE)


@inline
def _pair_up(values: int, stride: int, seen: int, zeros: int, pairs: int, ahead: int) -> None:
    """Interleave one chunk of 32 values into [16, chunk]: those of two keys next to each other, and 0 for
    unseen keys."""
    for n in range(TILE):
        even, odd = values + 4 * n * stride, values + 4 * n * stride + 2 * stride
        interleave(even if 2 * n < seen else zeros, odd if 2 * n + 1 < seen else zeros, pairs + 4 * _CHUNK * n)
        even, odd = even + LINE, odd + LINE
        at = pairs + 4 * _CHUNK * n + 2 * LINE
        interleave(even if 2 * n < seen else zeros, odd if 2 * n + 1 < seen else zeros, at)
        prefetch(even + ahead - LINE)
        prefetch(even + ahead)
        prefetch(odd + ahead - LINE)
        prefetch(odd + ahead)


@inline
def _add_values(weights: int, stride: int, pairs: int) -> None:
    """Add 16 weighted sums of a chunk of 32 values to the first four tiles."""
    load_tile(4, weights, stride)
    load_tile(5, pairs, 4 * _CHUNK)
    load_tile(6, pairs + LINE, 4 * _CHUNK)
    load_tile(7, pairs + 2 * LINE, 4 * _CHUNK)
    add_tile_product(0, 4, 5)
    add_tile_product(1, 4, 6)
    add_tile_product(2, 4, 7)
    load_tile(5, pairs + 3 * LINE, 4 * _CHUNK)
    add_tile_product(3, 4, 5)


@kernel
def attend_tiles(
    query: Query,
    key: Key,
    value: Value,
    position: Position,
    keys: Keys,
    values: Values,
    out: Out,
    tile_shapes: Annotated[int, uint8(64)],
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
    multiplied with the values. Those of the next head are prefetched meanwhile, a few lines at a time, because many
    requests at once would stall.
    """
    groups = heads // kv_heads
    queries, columns = np.zeros((size // 2, TILE), np.uint32), np.empty((_BLOCK, TILE), np.float32)
    scores, weights = np.empty((groups, capacity + 4), np.float32), np.zeros((TILE, capacity), np.uint16)
    pairs, sums, zeros = np.empty((TILE, _CHUNK), np.uint32), np.empty((TILE, _CHUNK), np.float32), np.zeros(32)
    at_queries, at_columns, at_weights = address_of(queries), address_of(columns), address_of(weights)
    at_pairs, at_sums, at_zeros = address_of(pairs), address_of(sums), address_of(zeros)
    lines = (_BLOCK * size // (LINE // 2) + groups - 1) // groups  # of 32 keys, the share of each query head
    configure_tiles(tile_shapes)
    first, last = share(rows * kv_heads)
    for task in range(first, last):
        row, head = task // kv_heads, task % kv_heads
        row_keys, row_values = keys + 2 * task * capacity * size, values + 2 * task * capacity * value_size
        newest = position[row]
        start = max(0, newest + 1 - window) if window > 0 else 0
        begin = start // _BLOCK * _BLOCK
        end = newest + 1 - begin
        copy(key + 2 * (row * key_row + head * key_head), size, row_keys + 2 * newest * size)
        copy(value + 2 * (row * value_row + head * value_head), value_size, row_values + 2 * newest * value_size)
        for group in range(groups):
            of_query = array_uint32(query + 2 * (row * query_row + (head * groups + group) * query_head), (size // 2,))
            for pair in range(size // 2):
                queries[pair, group] = of_query[pair]
        for n in range(0, end, _BLOCK):
            _scores(row_keys + 2 * (begin + n) * size, size, at_queries, at_columns)
            for group in range(groups):
                to_scores = scores[group]
                for i in range(_BLOCK):
                    to_scores[n + i] = columns[i, group] * scale
                for line in range(group * lines, (group + 1) * lines):
                    prefetch(row_keys + 2 * (capacity + begin + n) * size + LINE * line)
        for group in range(groups):
            attention_weights(scores[group], start - begin, end - (start - begin), softcap, weights[group])
        for chunk in range(0, value_size, _CHUNK):
            clear_tile(0)
            clear_tile(1)
            clear_tile(2)
            clear_tile(3)
            for n in range(0, end, _BLOCK):
                block_values, ahead = row_values + 2 * ((begin + n) * value_size + chunk), 2 * capacity * value_size
                _pair_up(block_values, value_size, end - n, at_zeros, at_pairs, ahead)
                _add_values(at_weights + 2 * n, 2 * capacity, at_pairs)
            store_tile(0, at_sums, 4 * _CHUNK)
            store_tile(1, at_sums + LINE, 4 * _CHUNK)
            store_tile(2, at_sums + 2 * LINE, 4 * _CHUNK)
            store_tile(3, at_sums + 3 * LINE, 4 * _CHUNK)
            for group in range(groups):
                of, to = sums[group], out[row, head * groups + group]
                for e in range(_CHUNK):
                    to[chunk + e] = rounded(of[e])
    release_tiles()
    keep_alive((queries, columns, weights, pairs, sums, zeros))


def attend(**arguments: Tensor | float) -> None:
    """Call `attend_tiles` with the arguments of `tether.kernels.cpu.decode_attention.attend`."""
    attend_tiles(**arguments, tile_shapes=_TILE_SHAPES[-1])
