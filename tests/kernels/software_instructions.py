"""AMX and AVX512_BF16 in software: with ``-p tests.kernels.software_instructions`` pytest runs kernels without them.

Only the instructions of `tether.kernels.cpu.amx_instructions`, and the product of pairs in
`tether.kernels.cpu.avx512_instructions`, are replaced, so what runs is the kernels that AMX and AVX-512 run. A tile
that is not configured, or whose shape does not fit the others of a product, ends the process, as on the processor.
"""

from __future__ import annotations

import tempfile
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import carray, types

from tether.kernels.cpu import amx_instructions, avx512_instructions, openmp_loop
from tether.kernels.cpu.avx512_instructions import declared
from tether.kernels.cpu.openmp_loop import load, pointer

_cache = tempfile.TemporaryDirectory()
numba.config.CACHE_DIR = _cache.name  # such kernels must not be found by a process that has the instructions

THREADS, TILES, ROWS, WIDTH = 256, 8, 16, 64
_bytes = np.zeros((THREADS, TILES, ROWS, WIDTH), np.uint8)
_shapes = np.zeros((THREADS, TILES, 2), np.int64)  # rows, bytes of a row; 0: not configured
# Arrays of this module would be copied into a compiled function; what lies at an address is not.
_BYTES, _SHAPES = _bytes.ctypes.data, _shapes.ctypes.data
_thread, _abort = openmp_loop._thread, types.ExternalFunction("abort", types.void())


@numba.njit
def _shape(tile: Any) -> Any:
    shape = carray(pointer(_SHAPES, np.int64(0)), (THREADS, TILES, 2))[_thread(), tile]
    if shape[0] == 0:
        _abort()
    return shape[0], shape[1]


@numba.njit
def _held(tile: Any) -> Any:
    return carray(pointer(_BYTES, np.uint8(0)), (THREADS, TILES, ROWS, WIDTH))[_thread(), tile]


@numba.njit
def _numbers(tile: Any) -> Any:
    at = _BYTES + ROWS * WIDTH * (TILES * _thread() + tile)
    return carray(pointer(at, np.uint16(0)), (ROWS, WIDTH // 2))


@numba.njit
def _sums(tile: Any) -> Any:
    at = _BYTES + ROWS * WIDTH * (TILES * _thread() + tile)
    return carray(pointer(at, np.float32(0)), (ROWS, WIDTH // 4))


def ldtilecfg(address: Any) -> None:
    """See `amx_instructions.configure_tiles`."""
    given = carray(pointer(address, np.uint8(0)), (64,))
    shapes = carray(pointer(_SHAPES, np.int64(0)), (THREADS, TILES, 2))[_thread()]
    for tile in range(TILES):
        shapes[tile, 0], shapes[tile, 1] = given[48 + tile], given[16 + 2 * tile]
        _held(tile)[:] = 0


def tilerelease() -> None:
    """See `amx_instructions.release_tiles`."""
    carray(pointer(_SHAPES, np.int64(0)), (THREADS, TILES, 2))[_thread()] = 0


def tilezero(tile: Any) -> None:
    """See `amx_instructions.clear_tile`."""
    _shape(tile)
    _held(tile)[:] = 0


def tileloadd64(tile: Any, address: Any, stride: Any) -> None:
    """See `amx_instructions.load_tile`."""
    rows, width = _shape(tile)
    held = _held(tile)
    held[:] = 0
    for row in range(rows):
        held[row, :width] = carray(pointer(address + stride * row, np.uint8(0)), (width,))


def tilestored64(tile: Any, address: Any, stride: Any) -> None:
    """See `amx_instructions.store_tile`."""
    rows, width = _shape(tile)
    held = _held(tile)
    for row in range(rows):
        carray(pointer(address + stride * row, np.uint8(0)), (width,))[:] = held[row, :width]


def tdpbf16ps(sums: Any, left: Any, right: Any) -> None:
    """See `amx_instructions.add_tile_product`."""
    (rows, out_width), (left_rows, left_width), (pairs, right_width) = _shape(sums), _shape(left), _shape(right)
    if left_rows != rows or 4 * pairs != left_width or right_width != out_width:
        _abort()
    to, x, y = _sums(sums), _numbers(left), _numbers(right)
    for row in range(rows):
        for pair in range(pairs):
            for column in range(out_width // 4):
                to[row, column] += load(x[row, 2 * pair]) * load(y[pair, 2 * column])
                to[row, column] += load(x[row, 2 * pair + 1]) * load(y[pair, 2 * column + 1])


_compiled = []
for _function in (ldtilecfg, tilerelease, tilezero, tileloadd64, tilestored64, tdpbf16ps):
    _count = _function.__code__.co_argcount
    _compiled.append(numba.cfunc(types.void(*[types.int64] * _count))(_function))
    binding.add_symbol(f"software_{_function.__name__}", _compiled[-1].address)


def _instruction(name: str, kinds: str, *arguments: Any) -> Any:
    """In the place of `amx_instructions._instruction`."""
    number = ir.IntType(64)

    def code(context: Any, builder: ir.IRBuilder, _: Any, values: Any) -> Any:
        function = declared(builder, f"software_{name}", ir.VoidType(), [number] * len(kinds))
        given = [
            number(argument.literal_value)
            if isinstance(argument, types.IntegerLiteral)
            else context.cast(builder, value, argument, types.int64)
            for argument, value in zip(arguments, values, strict=True)
        ]
        builder.call(function, given)
        return context.get_dummy_value()

    return types.void(*arguments), code


amx_instructions._instruction = _instruction
amx_instructions.has_amx = lambda: True


def _dot(builder: ir.IRBuilder, sums: Any, row: Any, columns: Any) -> Any:
    """In the place of `avx512_instructions._dot`: a bfloat16 number is the upper half of a float32."""
    words, floats = ir.VectorType(ir.IntType(32), 16), ir.VectorType(ir.FloatType(), 16)

    def both(pairs: Any) -> tuple[Any, Any]:
        lower = builder.shl(pairs, ir.Constant(words, [16] * 16))
        upper = builder.and_(pairs, ir.Constant(words, [0xFFFF0000] * 16))
        return builder.bitcast(lower, floats), builder.bitcast(upper, floats)

    for x, y in zip(both(row), both(columns), strict=True):
        sums = builder.fadd(sums, builder.fmul(x, y))
    return sums


avx512_instructions._dot = _dot
avx512_instructions.has_avx512_bf16 = lambda: True
