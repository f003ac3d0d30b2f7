"""A linear layer of one or two rows, and what all kernels for linear layers share: the epilogue of a product.

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
"""The epilogue, applied before a product is rounded: nothing, SiLU, or times or plus `other`."""


@inline
def finish(sums: int, columns: int, bias: int, epilogue: int, other: int, out: int) -> None:
    """Bias and epilogue for up to 32 float32 sums at an address, rounded to `out`; `bias` may be 0: none."""
    of, beside = array_float32(sums, (COLUMNS,)), array_bfloat16(other, (columns,))
    if bias != 0:
        summand = array_bfloat16(bias, (columns,))
        for o in range(columns):
            of[o] += load(summand[o])
    if epilogue == SILU:
        for o in range(COLUMNS):
            of[o] = silu(of[o])
    elif epilogue == TIMES:
        for o in range(columns):
            of[o] *= load(beside[o])
    elif epilogue == PLUS:
        for o in range(columns):
            of[o] += load(beside[o])
    if columns == COLUMNS:
        round_to_bfloat16(sums, out)
    else:
        to = array_bfloat16(out, (columns,))
        for o in range(columns):
            to[o] = rounded(of[o])


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
    """x [N, E] of few rows times a weight [O, E] as it is, plus bias [O] -> out [N, O]; `other` [N, O].

    A row of the weight is read once for all rows of x, and four that lie far from each other at the same time: alone,
    none comes from memory at full speed.
    """
    of_bias = array_bfloat16(bias, (outputs,))
    first, last = share(outputs)
    apart = (last - first + 3) // 4
    sums = np.empty(4, np.float32)
    for o in range(first, min(first + apart, last)):
        w0, w1 = weight[o], weight[min(o + apart, last - 1)]
        w2, w3 = weight[min(o + 2 * apart, last - 1)], weight[min(o + 3 * apart, last - 1)]
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
            beside = array_bfloat16(other + 2 * row * other_row, (outputs,))
            to = array_bfloat16(out + 2 * row * out_row, (outputs,))
            for i in range(4):
                at = min(o + i * apart, last - 1)
                total = sums[i] + load(of_bias[at]) if bias != 0 else sums[i]
                if epilogue == SILU:
                    total = silu(total)
                elif epilogue == TIMES:
                    total *= load(beside[at])
                elif epilogue == PLUS:
                    total += load(beside[at])
                to[at] = rounded(total)
