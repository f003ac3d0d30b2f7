"""Kernels over bfloat16 numbers on a CPU under Linux: the operations between the matrix products of a model.

In PyTorch these are chains of small operations, each of which reads and writes all its numbers and starts its threads
again. Here a chain is one kernel that computes in float32 and rounds once. `tether.kernels.reference` has the same
operations, with their formulas, in PyTorch.

Legend: N rows, H heads, D = head size, E = width.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from tether.kernels.cpu.kernel_signature import BFloat16s, Floats, bfloat16, float32
from tether.kernels.cpu.openmp_loop import (
    array_bfloat16,
    chunks,
    f32,
    kernel,
    load,
    rounded,
    sigmoid,
    silu,
    tasks,
)

LINE = 32
"""Numbers in a cache line, which two threads should not both write to."""


@kernel
def rms_norm(
    x: Annotated[int, bfloat16("rows", "heads", "width", strides=("row_stride",))],
    weight: Annotated[BFloat16s, bfloat16("width")],
    out: Annotated[BFloat16s, bfloat16("rows", "heads", "width")],
    scale: Annotated[Floats, float32("rows", "heads")],
    offset: float,
    eps: float,
    rows: int,
    heads: int,
    width: int,
    row_stride: int,
    queue: int,
) -> None:
    """Normalise x [N, H, E] with weight [E] to out [N, H, E], and store the factor of each head in scale [N, H]."""
    for task in tasks(queue, rows * heads):
        row, head = task // heads, task % heads
        of, to = array_bfloat16(x + 2 * (row * row_stride + head * width), (width,)), out[row, head]
        total = f32(0)
        for e in range(width):
            total += load(of[e]) * load(of[e])
        factor = f32(1) / np.sqrt(total / f32(width) + eps)
        scale[row, head] = factor
        if offset == 0:  # transformers rounds before the weight in this case
            for e in range(width):
                to[e] = rounded(load(rounded(load(of[e]) * factor)) * load(weight[e]))
        else:
            for e in range(width):
                to[e] = rounded(load(of[e]) * factor * (offset + load(weight[e])))


@kernel
def rms_norm_backward(
    x: Annotated[BFloat16s, bfloat16("rows", "width")],
    weight: Annotated[BFloat16s, bfloat16("width")],
    scale: Annotated[Floats, float32("rows")],
    grad: Annotated[BFloat16s, bfloat16("rows", "width")],
    grad_x: Annotated[BFloat16s, bfloat16("rows", "width")],
    grad_weight: Annotated[Floats, float32("row_groups", "width")],
    offset: float,
    rows: int,
    row_groups: int,
    width: int,
    queue: int,
) -> None:
    """Compute grad_x [N, E] from x and grad [N, E], and add the gradient of the weight for each group of rows to
    grad_weight [P, E]."""
    for group in tasks(queue, row_groups):
        sums = grad_weight[group]
        for row in range(rows * group // row_groups, rows * (group + 1) // row_groups):
            of, back, to, factor = x[row], grad[row], grad_x[row], scale[row]
            along = f32(0)
            for e in range(width):
                along += load(back[e]) * (offset + load(weight[e])) * load(of[e])
            along *= factor * factor / f32(width)
            for e in range(width):
                g, number = load(back[e]), load(of[e])
                to[e] = rounded((g * (offset + load(weight[e])) - number * along) * factor)
                sums[e] += g * number * factor


@kernel
def silu_mul(
    gate: Annotated[BFloat16s, bfloat16("count")],
    up: Annotated[BFloat16s, bfloat16("count")],
    out: Annotated[BFloat16s, bfloat16("count")],
    count: int,
    queue: int,
) -> None:
    """Compute out = silu(gate) * up, all [N]."""
    for first, last in chunks(queue, count, LINE):
        of_gate, of_up, to = gate[first:last], up[first:last], out[first:last]
        for i in range(len(to)):
            to[i] = rounded(silu(load(of_gate[i])) * load(of_up[i]))


@kernel
def silu_mul_backward(
    gate: Annotated[BFloat16s, bfloat16("count")],
    up: Annotated[BFloat16s, bfloat16("count")],
    grad: Annotated[BFloat16s, bfloat16("count")],
    grad_gate: Annotated[BFloat16s, bfloat16("count")],
    grad_up: Annotated[BFloat16s, bfloat16("count")],
    count: int,
    queue: int,
) -> None:
    """Compute the gradients of gate and up [N] from gate, up and grad [N]."""
    for first, last in chunks(queue, count, LINE):
        of_gate, of_up, of_grad = gate[first:last], up[first:last], grad[first:last]
        to_gate, to_up = grad_gate[first:last], grad_up[first:last]
        for i in range(len(of_grad)):
            g, x = load(of_grad[i]), load(of_gate[i])
            s = sigmoid(x)
            to_gate[i] = rounded(g * load(of_up[i]) * s * (f32(1) + x * (f32(1) - s)))
            to_up[i] = rounded(g * x * s)


@kernel
def rotate(
    x: Annotated[int, bfloat16("rows", "heads", "size", strides=("row_stride",))],
    cosine: Annotated[BFloat16s, bfloat16("rows", "size")],
    sine: Annotated[BFloat16s, bfloat16("rows", "size")],
    out: Annotated[BFloat16s, bfloat16("rows", "heads", "size")],
    sign: float,
    rows: int,
    heads: int,
    size: int,
    row_stride: int,
    queue: int,
) -> None:
    """Rotate x [N, H, D] to out [N, H, D] by `sign` times the angles of cosine and sine [N, D], which repeat for both
    halves."""
    half = size // 2
    for row in tasks(queue, rows):
        c, s, heads_of_row = cosine[row], sine[row], array_bfloat16(x + 2 * row * row_stride, (heads, size))
        for head in range(heads):
            of, to = heads_of_row[head], out[row, head]
            for d in range(half):
                low, high, sin = load(of[d]), load(of[half + d]), sign * load(s[d])
                to[d] = rounded(low * load(c[d]) - high * sin)
                to[half + d] = rounded(high * load(c[d]) + low * sin)
