"""A linear layer over one or two rows, and the epilogue that all kernels for linear layers share.

Legend: N rows, E and O = width of the input and of the output.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from tether.kernels.cpu.avx512_instructions import COLUMNS, round_to_bfloat16
from tether.kernels.cpu.kernel_signature import BFloat16s, bfloat16
from tether.kernels.cpu.openmp_loop import (
    array_bfloat16,
    array_float32,
    f32,
    inline,
    kernel,
    load,
    rounded,
    share,
    silu,
)

PLAIN, SILU, TIMES, PLUS = range(4)
"""The epilogue, applied before a product is rounded: nothing, SiLU, or multiplication with or addition of `other`."""


@inline
def finish(sums: int, columns: int, bias: int, epilogue: int, other: int, out: int) -> None:
    """Apply bias and epilogue to up to 32 float32 sums at an address and round them to `out`; a `bias` of 0 means
    none."""
    total, operand = array_float32(sums, (COLUMNS,)), array_bfloat16(other, (columns,))
    if bias != 0:
        summand = array_bfloat16(bias, (columns,))
        for o in range(columns):
            total[o] += load(summand[o])
    if epilogue == SILU:
        for o in range(COLUMNS):
            total[o] = silu(total[o])
    elif epilogue == TIMES:
        for o in range(columns):
            total[o] *= load(operand[o])
    elif epilogue == PLUS:
        for o in range(columns):
            total[o] += load(operand[o])
    if columns == COLUMNS:
        round_to_bfloat16(sums, out)
    else:
        to = array_bfloat16(out, (columns,))
        for o in range(columns):
            to[o] = rounded(total[o])


@kernel
def linear_few_rows(
    x: Annotated[BFloat16s, bfloat16("rows", "width")],
    weight: Annotated[BFloat16s, bfloat16("outputs", "width")],
    bias: Annotated[int, bfloat16("outputs", optional=True)],
    other: Annotated[int, bfloat16("rows", "outputs", strides=("other_row",), optional=True)],
    out: Annotated[int, bfloat16("rows", "outputs", strides=("out_row",))],
    epilogue: int,
    rows: int,
    width: int,
    outputs: int,
    other_row: int,
    out_row: int,
) -> None:
    """Multiply few rows x [N, E] with an unpacked weight [O, E], add bias [O] and apply the epilogue: out [N, O].

    Each row of the weight is read once for all rows of x. Four distant rows are read at the same time, because a single
    stream does not reach the full memory bandwidth.
    """
    of_bias = array_bfloat16(bias, (outputs,))
    first, last = share(outputs)
    stride = (last - first + 3) // 4
    sums = np.empty(4, np.float32)
    for o in range(first, min(first + stride, last)):
        w0, w1 = weight[o], weight[min(o + stride, last - 1)]
        w2, w3 = weight[min(o + 2 * stride, last - 1)], weight[min(o + 3 * stride, last - 1)]
        for row in range(rows):
            of = x[row]
            s0, s1, s2, s3 = f32(0), f32(0), f32(0), f32(0)
            for e in range(width):
                number = load(of[e])
                s0 += number * load(w0[e])
                s1 += number * load(w1[e])
                s2 += number * load(w2[e])
                s3 += number * load(w3[e])
            sums[0], sums[1], sums[2], sums[3] = s0, s1, s2, s3
            operand = array_bfloat16(other + 2 * row * other_row, (outputs,))
            to = array_bfloat16(out + 2 * row * out_row, (outputs,))
            for i in range(4):
                at = min(o + i * stride, last - 1)
                total = sums[i] + load(of_bias[at]) if bias != 0 else sums[i]
                if epilogue == SILU:
                    total = silu(total)
                elif epilogue == TIMES:
                    total *= load(operand[at])
                elif epilogue == PLUS:
                    total += load(operand[at])
                to[at] = rounded(total)
