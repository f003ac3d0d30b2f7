"""AMX for compiled kernels: Intel's eight registers that hold a tile of a matrix each, and what they can do.

A tile is up to 16 rows of 64 bytes. A tile product adds to 16 x 16 float32 sums what 16 rows of 32 bfloat16 numbers
give with 16 columns of 32 numbers. The tile of those columns holds numbers in pairs: its row p has the numbers 2p and
2p + 1 of each column side by side. ("Intel Intrinsics Guide", AMX-TILE and AMX-BF16.)
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
"""Rows of a tile, and columns of sums."""
DEPTH = 32
"""Numbers of a row that a tile product goes through."""
LINE = 64
"""Bytes of a tile's row."""

_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18  # of Linux's arch_prctl, whose number is 158


@cache
def has_amx() -> bool:
    """Whether this processor has these instructions, and Linux lets this process use them."""
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    return bool(ctypes.CDLL(None).syscall(158, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def shapes_of(tiles: Mapping[int, tuple[int, int]]) -> NDArray[np.uint8]:
    """The argument of `configure_tiles`: for each tile in use its rows and the bytes of a row."""
    shapes = np.zeros(64, np.uint8)
    shapes[0] = 1  # the only palette that there is
    for tile, (rows, width) in tiles.items():
        shapes[16 + 2 * tile], shapes[48 + tile] = width, rows
    return shapes


def _instruction(name: str, kinds: str, *arguments: Type) -> Typed:
    """LLVM's function of that name; of its arguments ``t`` is a tile, ``p`` an address and ``n`` a number."""
    for kind, argument in zip(kinds, arguments, strict=True):
        if kind == "t" and not isinstance(argument, types.IntegerLiteral):
            raise RequireLiteralValue("which tile has to be known when a kernel is compiled")
    byte = ir.IntType(8)
    of_kind: dict[str, ir.Type] = {"t": byte, "p": byte.as_pointer(), "n": ir.IntType(64)}
    made: dict[str, Callable[..., Value]] = {
        "t": lambda builder, argument, value: byte(argument.literal_value),
        "p": lambda builder, argument, value: builder.inttoptr(value, byte.as_pointer()),
        "n": lambda builder, argument, value: value,
    }

    def code(context: BaseContext, builder: ir.IRBuilder, _: Signature, values: Sequence[Value]) -> Value:
        function = declared(builder, f"llvm.x86.{name}", ir.VoidType(), [of_kind[kind] for kind in kinds])
        of = zip(kinds, arguments, values, strict=True)
        builder.call(function, [made[kind](builder, argument, value) for kind, argument, value in of])
        return context.get_dummy_value()

    return types.void(*arguments), code


@instruction
def configure_tiles(typing: BaseContext, shapes: Type) -> Typed:
    """Give the tiles the shapes at an address; what they held is lost."""
    return _instruction("ldtilecfg", "p", shapes)


@instruction
def release_tiles(typing: BaseContext) -> Typed:
    """Say that this thread needs no tiles for now."""
    return _instruction("tilerelease", "")


@instruction
def clear_tile(typing: BaseContext, tile: Type) -> Typed:
    """Fill a tile with zeros."""
    return _instruction("tilezero", "t", tile)


@instruction
def load_tile(typing: BaseContext, tile: Type, address: Type, stride: Type) -> Typed:
    """Fill a tile with rows that lie `stride` bytes from each other."""
    return _instruction("tileloadd64", "tpn", tile, address, stride)


@instruction
def store_tile(typing: BaseContext, tile: Type, address: Type, stride: Type) -> Typed:
    """Write a tile's rows, `stride` bytes from each other."""
    return _instruction("tilestored64", "tpn", tile, address, stride)


@instruction
def add_tile_product(typing: BaseContext, sums: Type, left: Type, right: Type) -> Typed:
    """Add the product of two tiles to a third."""
    return _instruction("tdpbf16ps", "ttt", sums, left, right)
