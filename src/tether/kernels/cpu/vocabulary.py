"""Kernels over logits: sums over the vocabulary for sampling and log-probabilities, and the gradient of the latter.

Legend: N rows, V = vocabulary, C = vocabulary entries in a chunk.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from tether.kernels.cpu.kernel_signature import BFloat16s, Floats, Ints, bfloat16, float32, int64
from tether.kernels.cpu.openmp_loop import exp, f32, inline, kernel, load, rounded, tasks


@inline
def _ordered(bits: np.uint16) -> np.int32:
    """Map bfloat16 bits to an integer of the same order; the function is its own inverse."""
    signed = np.int32(np.int16(bits))
    return signed ^ ((signed >> np.int32(31)) & np.int32(0x7FFF))


@inline
def _largest(numbers: BFloat16s) -> float:
    """Return the maximum of bfloat16 numbers as float32; it may be NaN where one of them is."""
    largest = np.int32(-0x8000)
    for n in range(len(numbers)):
        largest = max(largest, _ordered(numbers[n]))
    return load(np.uint16(_ordered(np.uint16(largest))))


@kernel
def exp_sums(
    logits: Annotated[BFloat16s, bfloat16("rows", "width")],
    largest: Annotated[Floats, float32("rows")],
    sums: Annotated[Floats, float32("rows", "blocks")],
    block: int,
    factor: float,
    rows: int,
    width: int,
    blocks: int,
    queue: int,
) -> None:
    """Compute the maxima [N] of logits [N, V], and the sums of e^(factor * (logit - maximum)) over blocks [N, B]."""
    for row in tasks(queue, rows):
        of, to, top = logits[row], sums[row], _largest(logits[row])
        largest[row] = top
        for b in range(blocks):
            entries, total = of[b * block : (b + 1) * block], f32(0)
            for n in range(len(entries)):
                total += exp((load(entries[n]) - top) * factor)
            to[b] = total


@kernel
def add_log_sums(
    logits: Annotated[BFloat16s, bfloat16("rows", "width")],
    sums: Annotated[Floats, float32("rows", 4)],
    factor: float,
    rows: int,
    width: int,
    queue: int,
) -> None:
    """Add a chunk's logits [N, C] to the running `sums` [N, 4] of the previous chunks.

    The sums are, with z = logits * factor: m = max z, sum e^(z-m), sum e^(z-m) (z-m), sum e^2(z-m).
    """
    for row in tasks(queue, rows):
        of, so_far = logits[row], sums[row]
        before, top = so_far[0], _largest(of) * factor
        top = before if before > top else top
        mass, moment, square = f32(0), f32(0), f32(0)
        for n in range(width):
            z = load(of[n]) * factor - top
            e = exp(z)
            mass += e
            moment += e * z
            square += e * e
        shift = before - top
        decay = exp(shift)
        so_far[0] = top
        so_far[2] = decay * (so_far[2] + shift * so_far[1]) + moment
        so_far[1] = decay * so_far[1] + mass
        so_far[3] = decay * decay * so_far[3] + square


@kernel
def log_probs_backward(
    logits: Annotated[BFloat16s, bfloat16("rows", "width")],
    statistics: Annotated[Floats, float32("rows", 4)],
    column: Annotated[Ints, int64("rows")],
    factor: float,
    rows: int,
    width: int,
    queue: int,
) -> None:
    """Replace a chunk's logits [N, C] by their gradient.

    `statistics` [N, 4]: log normaliser, entropy, upstream gradients of log-probability and of entropy. `column` [N]:
    column of the target in this chunk, or -1.
    """
    for row in tasks(queue, rows):
        of, target = logits[row], column[row]
        log_sum, entropy = statistics[row, 0], statistics[row, 1]
        from_log_prob, from_entropy = statistics[row, 2], statistics[row, 3]
        at_target = f32(0)
        if target >= 0:
            log_p = load(of[target]) * factor - log_sum
            at_target = from_log_prob - exp(log_p) * (from_log_prob + from_entropy * (log_p + entropy))
        for n in range(width):
            log_p = load(of[n]) * factor - log_sum
            of[n] = rounded(-exp(log_p) * (from_log_prob + from_entropy * (log_p + entropy)))
        if target >= 0:
            of[target] = rounded(at_target)
