"""AVX-512 for compiled kernels: products of bfloat16 numbers with float32 sums, and the instructions around them.

`add_products` multiplies rows with columns stored in pairs: the numbers 2p and 2p + 1 of 32 columns are next to each
other and fill two registers. The products of a row's numbers 2p and 2p + 1 with them are added to the 32 sums of the
row. ("Intel Intrinsics Guide", AVX512_BF16; AMD's processors have it since Zen 4.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import numba
from llvmlite import binding, ir
from numba import types
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

COLUMNS = 32
"""Columns whose sums are in registers at once, two registers for each row."""
# Rows whose sums are in registers: with a pair of columns and a pair of the row this uses 27 of 32 registers.
_AT_ONCE = 12
_PAIRS_AT_ONCE = 4  # loop unrolling
_PAIR = 4 * COLUMNS  # bytes of one pair of all columns
_AHEAD = 32  # bytes that are prefetched while a pair is multiplied


class _BFloat(ir.types.Type):  # llvmlite has no bfloat16
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BYTES, _WORD, _PAIR_OF_ROW = ir.IntType(8), ir.IntType(64), ir.IntType(32)
_SUMS = ir.VectorType(ir.FloatType(), 16)
_NUMBERS = ir.VectorType(_BFloat(), 32)
_PAIRS = ir.VectorType(_PAIR_OF_ROW, 16)

Type: TypeAlias = types.Type
Value: TypeAlias = ir.Value
Typed: TypeAlias = tuple[Signature, Callable[..., Value]]
"""The signature of an instruction, and the function that generates its code."""
# A decorated function becomes an intrinsic of compiled code, whose arguments differ from those of its definition.
instruction: Any = intrinsic


@cache
def has_avx512_bf16() -> bool:
    """Return whether the processor multiplies pairs of bfloat16 numbers."""
    features = binding.get_host_cpu_features()
    return all(features.get(name) for name in ("avx512f", "avx512bw", "avx512bf16"))


def declared(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Type]) -> Value:
    """Return LLVM's function of that name, declared in the module that is being built."""
    module: ir.Module = builder.module
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, arguments), name)


@instruction
def _add_products(
    typing: BaseContext,
    x: Type,
    stride: Type,
    rows: Type,
    weight: Type,
    pairs: Type,
    out: Type,
    to: Type,
    is_new: Type,
    ahead: Type,
) -> Typed:
    """Add products of up to 12 rows as `add_products` does, prefetching from the address `ahead` on."""

    def code(context: BaseContext, builder: ir.IRBuilder, _: Signature, values: Sequence[Value]) -> Value:
        rows = values[2]
        end = builder.append_basic_block("end")
        cases = builder.switch(rows, end)
        for count in range(1, _AT_ONCE + 1):
            block = builder.append_basic_block(f"rows{count}")
            cases.add_case(_WORD(count), block)
            builder.position_at_end(block)
            _add_products_of(builder, count, *values[:2], *values[3:])
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), code


def _add_products_of(
    b: ir.IRBuilder,
    rows: int,
    x: Value,
    stride: Value,
    weight: Value,
    pairs: Value,
    out: Value,
    to: Value,
    is_new: Value,
    ahead: Value,
) -> None:
    """Generate the code for a fixed number of rows, whose sums stay in registers over all pairs."""
    starts = [b.add(x, b.mul(stride, _WORD(row))) for row in range(rows)]
    row_sums = [b.add(out, b.mul(to, _WORD(row))) for row in range(rows)]
    addresses = [_pointer(b, b.add(start, _WORD(64 * half)), _SUMS) for start in row_sums for half in range(2)]
    nothing, is_first = ir.Constant(_SUMS, [0.0] * 16), b.icmp_signed("!=", is_new, _WORD(0))
    before = [b.select(is_first, nothing, b.load(address, align=4)) for address in addresses]
    entry, loop, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
    b.branch(loop)

    b.position_at_end(loop)
    pair, sums = b.phi(_WORD), [b.phi(_SUMS) for _ in addresses]
    now: list[Value] = list(sums)
    each = _PAIR if rows < _AT_ONCE // 2 else _AHEAD  # with few rows, all columns are read only once
    for line in range(0, each * _PAIRS_AT_ONCE, 64):
        _prefetch(b, b.add(ahead, b.add(b.mul(pair, _WORD(each)), _WORD(line))))
    for more in range(_PAIRS_AT_ONCE):
        this = b.add(pair, _WORD(more))
        at = b.add(weight, b.mul(this, _WORD(_PAIR)))
        columns = [b.load(_pointer(b, b.add(at, _WORD(64 * half)), _PAIRS), align=2) for half in range(2)]
        for row in range(rows):
            number = b.load(_pointer(b, b.add(starts[row], b.mul(this, _WORD(4))), _PAIR_OF_ROW), align=2)
            first = b.insert_element(ir.Constant(_PAIRS, ir.Undefined), number, _PAIR_OF_ROW(0))
            everywhere = b.shuffle_vector(first, first, ir.Constant(_PAIRS, [0] * 16))
            for half in range(2):
                now[2 * row + half] = _dot(b, now[2 * row + half], everywhere, columns[half])
    following = b.add(pair, _WORD(_PAIRS_AT_ONCE))
    for phi, first, then in zip([pair, *sums], [_WORD(0), *before], [following, *now], strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(then, loop)
    b.cbranch(b.icmp_signed("<", following, pairs), loop, after)

    b.position_at_end(after)
    for number, address in zip(now, addresses, strict=True):
        b.store(number, address, align=4)


def _dot(b: ir.IRBuilder, sums: Value, row: Value, columns: Value) -> Value:
    """Add to 16 sums the products of 16 pairs of bfloat16 numbers with 16 other pairs."""
    function = declared(b, "llvm.x86.avx512bf16.dpbf16ps.512", _SUMS, [_SUMS, _NUMBERS, _NUMBERS])
    return b.call(function, [sums, b.bitcast(row, _NUMBERS), b.bitcast(columns, _NUMBERS)])


def _pointer(b: ir.IRBuilder, address: Value, kind: ir.Type) -> Value:
    return b.inttoptr(address, kind.as_pointer())


@numba.njit
def add_products(
    x: int, stride: int, rows: int, weight: int, pairs: int, out: int, out_stride: int, is_new: int
) -> None:
    """Add to sums [R, 32] float32 at `out` the products of R rows at `x` with 32 columns at `weight` [pairs, 32, 2].

    Strides are in bytes; the number of pairs is a multiple of 4. `is_new` starts the sums at 0 and ignores what is at
    `out`. The memory behind the columns is prefetched meanwhile, because the next columns usually follow there.
    """
    num_groups = (rows + _AT_ONCE - 1) // _AT_ONCE
    for group in range(num_groups):
        first, last = rows * group // num_groups, rows * (group + 1) // num_groups
        source, target = x + first * stride, out + first * out_stride
        ahead = weight + _PAIR * pairs + group * _AHEAD * pairs
        _add_products(source, stride, last - first, weight, pairs, target, out_stride, is_new, ahead)


@instruction
def transpose_pairs(typing: BaseContext, x: Type, stride: Type, rows: Type, nothing: Type, out: Type) -> Typed:
    """Transpose 16 pairs of numbers of up to 16 rows into 16 of the 32 columns at `out`.

    `stride` is in bytes; rows from `rows` on have the numbers at `nothing`.
    """

    def code(context: BaseContext, builder: ir.IRBuilder, _: Signature, values: Sequence[Value]) -> Value:
        x, stride, rows, nothing, out = values
        numbers = []
        for row in range(16):
            exists = builder.icmp_signed("<", _WORD(row), rows)
            address = builder.select(exists, builder.add(x, builder.mul(stride, _WORD(row))), nothing)
            numbers.append(builder.load(_pointer(builder, address, _PAIRS), align=2))
        for step in (1, 2, 4, 8):  # each step swaps the upper right and the lower left of squares of this size
            lower = [lane if not lane & step else 16 + lane - step for lane in range(16)]
            upper = [lane + step if not lane & step else 16 + lane for lane in range(16)]
            for row in range(16):
                if not row & step:
                    two = numbers[row], numbers[row + step]
                    numbers[row] = builder.shuffle_vector(*two, ir.Constant(_PAIRS, lower))
                    numbers[row + step] = builder.shuffle_vector(*two, ir.Constant(_PAIRS, upper))
        for pair, columns in enumerate(numbers):
            builder.store(columns, _pointer(builder, builder.add(out, _WORD(_PAIR * pair)), _PAIRS), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), code


def _prefetch(b: ir.IRBuilder, address: Value) -> None:
    number, address_type = ir.IntType(32), _BYTES.as_pointer()
    function = declared(b, "llvm.prefetch.p0", ir.VoidType(), [address_type, number, number, number])
    to_read, second_level, data = number(0), number(2), number(1)
    b.call(function, [b.inttoptr(address, address_type), to_read, second_level, data])


@instruction
def prefetch(typing: BaseContext, address: Type) -> Typed:
    """Prefetch the cache line at an address into the second level of the cache."""

    def code(context: BaseContext, builder: ir.IRBuilder, _: Signature, values: Sequence[Value]) -> Value:
        _prefetch(builder, values[0])
        return context.get_dummy_value()

    return types.void(address), code


@instruction
def interleave(typing: BaseContext, even: Type, odd: Type, out: Type) -> Typed:
    """Interleave 32 bfloat16 numbers at one address with 32 at another: a pair of 32 columns at `out`."""

    def code(context: BaseContext, builder: ir.IRBuilder, _: Signature, values: Sequence[Value]) -> Value:
        half, full = ir.VectorType(ir.IntType(16), COLUMNS), ir.VectorType(ir.IntType(16), 2 * COLUMNS)
        evens, odds = (builder.load(builder.inttoptr(at, half.as_pointer()), align=2) for at in values[:2])
        order = [lane for n in range(COLUMNS) for lane in (n, COLUMNS + n)]
        pairs = builder.shuffle_vector(evens, odds, ir.Constant(ir.VectorType(ir.IntType(32), 2 * COLUMNS), order))
        builder.store(pairs, builder.inttoptr(values[2], full.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(even, odd, out), code


@instruction
def round_to_bfloat16(typing: BaseContext, numbers: Type, out: Type) -> Typed:
    """Round 32 float32 numbers at an address to bfloat16, as `tether.kernels.cpu.openmp_loop.rounded` does."""

    def code(context: BaseContext, builder: ir.IRBuilder, _: Signature, values: Sequence[Value]) -> Value:
        words, halves = ir.VectorType(ir.IntType(32), COLUMNS), ir.VectorType(ir.IntType(16), COLUMNS)
        bits = builder.load(builder.inttoptr(values[0], words.as_pointer()), align=4)

        def constant(number: int) -> ir.Constant:
            return ir.Constant(words, [number] * COLUMNS)

        odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
        nearest = builder.lshr(builder.add(builder.add(bits, constant(0x7FFF)), odd), constant(16))
        builder.store(builder.trunc(nearest, halves), builder.inttoptr(values[1], halves.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(numbers, out), code
