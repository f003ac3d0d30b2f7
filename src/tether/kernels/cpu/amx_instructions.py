"""AMX for compiled kernels: Intel's eight tile registers, each holding a small matrix, and their instructions.

A tile has up to 16 rows of 64 bytes. A tile product multiplies 16 rows of 32 bfloat16 numbers with 16 columns of 32
numbers and adds the result to 16 x 16 float32 sums. The column tile stores numbers in pairs: its row p has the numbers
2p and 2p + 1 of each column next to each other. ("Intel Intrinsics Guide", AMX-TILE and AMX-BF16.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core.base import BaseContext
from numba.core.errors import RequireLiteralValue
from numba.core.typing.templates import Signature
from numpy.typing import NDArray

from tether.kernels.cpu.avx512_instructions import Type, Typed, Value, declared, instruction

TILE = 16
"""Rows of a tile, and columns of its sums."""
DEPTH = 32
"""Length of the dot products in one tile product."""
LINE = 64
"""Bytes in a row of a tile."""

_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18  # arguments of Linux's arch_prctl, which is system call 158


@cache
def has_amx() -> bool:
    """Return whether the processor has AMX with bfloat16 and Linux lets this process use it."""
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    return bool(ctypes.CDLL(None).syscall(158, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def shapes_of(tiles: Mapping[int, tuple[int, int]]) -> NDArray[np.uint8]:
    """Return the argument of `configure_tiles`: the rows of each tile in use and the bytes of a row."""
    shapes = np.zeros(64, np.uint8)
    shapes[0] = 1  # the only palette
    for tile, (rows, width) in tiles.items():
        shapes[16 + 2 * tile], shapes[48 + tile] = width, rows
    return shapes


def _instruction(name: str, kinds: str, *arguments: Type) -> Typed:
    """Return the type and code of a call of an LLVM intrinsic; in `kinds`, ``t`` is a tile, ``p`` an address, ``n`` a
    number."""
    for kind, argument in zip(kinds, arguments, strict=True):
        if kind == "t" and not isinstance(argument, types.IntegerLiteral):
            raise RequireLiteralValue("which tile has to be known when a kernel is compiled")
    byte = ir.IntType(8)
    llvm_types: dict[str, ir.Type] = {"t": byte, "p": byte.as_pointer(), "n": ir.IntType(64)}
    operands: dict[str, Callable[..., Value]] = {
        "t": lambda builder, argument, value: byte(argument.literal_value),
        "p": lambda builder, argument, value: builder.inttoptr(value, byte.as_pointer()),
        "n": lambda builder, argument, value: value,
    }

    def code(context: BaseContext, builder: ir.IRBuilder, _: Signature, values: Sequence[Value]) -> Value:
        function = declared(builder, f"llvm.x86.{name}", ir.VoidType(), [llvm_types[kind] for kind in kinds])
        typed_values = zip(kinds, arguments, values, strict=True)
        builder.call(function, [operands[kind](builder, argument, value) for kind, argument, value in typed_values])
        return context.get_dummy_value()

    return types.void(*arguments), code


@instruction
def configure_tiles(typing: BaseContext, shapes: Type) -> Typed:
    """Set the shapes of all tiles from the table at an address; their content is lost."""
    return _instruction("ldtilecfg", "p", shapes)


@instruction
def release_tiles(typing: BaseContext) -> Typed:
    """Tell the processor that this thread uses no tiles for now."""
    return _instruction("tilerelease", "")


@instruction
def clear_tile(typing: BaseContext, tile: Type) -> Typed:
    """Fill a tile with zeros."""
    return _instruction("tilezero", "t", tile)


@instruction
def load_tile(typing: BaseContext, tile: Type, address: Type, stride: Type) -> Typed:
    """Fill a tile with rows that are `stride` bytes apart."""
    return _instruction("tileloadd64", "tpn", tile, address, stride)


@instruction
def store_tile(typing: BaseContext, tile: Type, address: Type, stride: Type) -> Typed:
    """Write the rows of a tile, `stride` bytes apart."""
    return _instruction("tilestored64", "tpn", tile, address, stride)


@instruction
def add_tile_product(typing: BaseContext, sums: Type, row_tile: Type, column_tile: Type) -> Typed:
    """Add the product of two tiles to a third one."""
    return _instruction("tdpbf16ps", "ttt", sums, row_tile, column_tile)
