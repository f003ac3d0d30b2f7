"""The elementwise step of the backward pass of causal attention: a compiled
`tether.kernels.causal_attention.weights_backward`."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from tether.kernels.cpu.kernel_signature import BFloat16s, Floats, bfloat16, float32
from tether.kernels.cpu.openmp_loop import exp, f32, kernel, load, rounded, tasks


@kernel
def weights_backward(
    scores: Annotated[Floats, float32("rows", "width")],
    grad_weights: Annotated[Floats, float32("rows", "width")],
    log_sum: Annotated[Floats, float32("rows")],
    out: Annotated[BFloat16s, bfloat16("rows", "size")],
    grad_out: Annotated[BFloat16s, bfloat16("rows", "size")],
    weights: Annotated[BFloat16s, bfloat16("rows", "width")],
    grad_scores: Annotated[BFloat16s, bfloat16("rows", "width")],
    scale: float,
    rows: int,
    width: int,
    size: int,
    queue: int,
) -> None:
    """Compute `weights` P and `grad_scores` dS [N, W] from Q K^T and dO V^T [N, W], log sums [N], O and dO [N, D].

    N counts the rows of stacked matrices of W queries each; entries that a query does not see become 0.
    """
    for row in tasks(queue, rows):
        of, back, to, to_grad, seen = scores[row], grad_weights[row], weights[row], grad_scores[row], row % width + 1
        of_out, of_grad, along, total = out[row], grad_out[row], f32(0), log_sum[row]
        for d in range(size):
            along += load(of_out[d]) * load(of_grad[d])
        for n in range(seen):
            weight = exp(of[n] * scale - total)
            to[n] = rounded(weight)
            to_grad[n] = rounded(weight * (back[n] - along))
        for n in range(seen, width):
            to[n] = to_grad[n] = np.uint16(0)
