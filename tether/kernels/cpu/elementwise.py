"""Loops over bfloat16 numbers in memory, on a CPU under Linux: what lies between a model's matrix products.

In PyTorch that is a chain of small operations: each reads and writes all its numbers, and starts its threads anew. Here
such a chain is one loop that computes in float32 and rounds once.

The formulas stand where the loops are called, in `tether.models` and `tether.rollout`, beside the same in PyTorch for
other devices and dtypes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from tether.kernels.cpu.avx512_instructions import COLUMNS, round_to
from tether.kernels.cpu.openmp_loop import (
    Loop,
    bfloat16s,
    capped,
    exp,
    float32s,
    float_of,
    inline,
    load,
    pointer,
    rounded,
    share,
    sigmoid,
    silu,
)


@Loop
def rms_norm(p: Any) -> None:
    """x [N, H, E] with a stride of N, weight [E] -> out [N, H, E], scale [N, H] float32."""
    a = carray(p, (10,))
    rows, heads, width, offset, eps = a[0] * a[1], a[1], a[2], float_of(a[3]), float_of(a[4])
    weight, out, scale = bfloat16s(a[6], (width,)), bfloat16s(a[7], (rows, width)), float32s(a[8], (rows,))
    first, last = share(rows)
    for row in range(first, last):
        of, to = bfloat16s(a[5] + 2 * (row // heads * a[9] + row % heads * width), (width,)), out[row]
        total = np.float32(0)
        for e in range(width):
            total += load(of[e]) * load(of[e])
        factor = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        scale[row] = factor
        if offset == 0:  # then transformers rounds before the weight
            for e in range(width):
                to[e] = rounded(load(rounded(load(of[e]) * factor)) * load(weight[e]))
        else:
            for e in range(width):
                to[e] = rounded(load(of[e]) * factor * (offset + load(weight[e])))


@Loop
def rms_norm_backward(p: Any) -> None:
    """x, grad [N, E], weight [E], scale [N] -> grad of x [N, E], and of the weight in `parts` [P, E] to be added up."""
    a = carray(p, (10,))
    rows, width, parts, offset = a[0], a[1], a[2], float_of(a[3])
    x, weight, scale = bfloat16s(a[4], (rows, width)), bfloat16s(a[5], (width,)), float32s(a[6], (rows,))
    grad = bfloat16s(a[7], (rows, width))
    grad_x, grad_weight = bfloat16s(a[8], (rows, width)), float32s(a[9], (parts, width))
    first, last = share(parts)
    for part in range(first, last):
        sums = grad_weight[part]
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            of, back, to, factor = x[row], grad[row], grad_x[row], scale[row]
            along = np.float32(0)
            for e in range(width):
                along += load(back[e]) * (offset + load(weight[e])) * load(of[e])
            along *= factor * factor / np.float32(width)
            for e in range(width):
                g, number = load(back[e]), load(of[e])
                to[e] = rounded((g * (offset + load(weight[e])) - number * along) * factor)
                sums[e] += g * number * factor


@Loop
def gated(p: Any) -> None:
    """gate, up [N] -> silu(gate) * up [N]."""
    a = carray(p, (4,))
    first, last = share(a[0])
    gate, up = bfloat16s(a[1], (a[0],))[first:last], bfloat16s(a[2], (a[0],))[first:last]
    out = bfloat16s(a[3], (a[0],))[first:last]
    for i in range(len(out)):
        out[i] = rounded(silu(load(gate[i])) * load(up[i]))


@Loop
def gated_backward(p: Any) -> None:
    """gate, up, grad [N] -> the gradients of gate and up [N]."""
    a = carray(p, (6,))
    first, last = share(a[0])
    gate, up = bfloat16s(a[1], (a[0],))[first:last], bfloat16s(a[2], (a[0],))[first:last]
    grad = bfloat16s(a[3], (a[0],))[first:last]
    grad_gate, grad_up = bfloat16s(a[4], (a[0],))[first:last], bfloat16s(a[5], (a[0],))[first:last]
    for i in range(len(grad)):
        g, x = load(grad[i]), load(gate[i])
        open_ = sigmoid(x)
        grad_gate[i] = rounded(g * load(up[i]) * open_ * (np.float32(1) + x * (np.float32(1) - open_)))
        grad_up[i] = rounded(g * x * open_)


@Loop
def rotate(p: Any) -> None:
    """x [N, H, D] with a stride of N -> out [N, H, D], by angles whose cosine and sine [N, D] are for both halves."""
    a = carray(p, (9,))
    rows, heads, size, sign, out, half = (
        a[0],
        a[1],
        a[2],
        float_of(a[3]),
        bfloat16s(a[7], (a[0], a[1], a[2])),
        a[2] // 2,
    )
    cosine, sine = bfloat16s(a[5], (rows, size)), bfloat16s(a[6], (rows, size))
    first, last = share(rows)
    for row in range(first, last):
        c, s, x = cosine[row], sine[row], bfloat16s(a[4] + 2 * row * a[8], (heads, size))
        for head in range(heads):
            of, to = x[head], out[row, head]
            for d in range(half):
                left, right, up = load(of[d]), load(of[half + d]), sign * load(s[d])
                to[d] = rounded(left * load(c[d]) - right * up)
                to[half + d] = rounded(right * load(c[d]) + left * up)


PLAIN, SILU, TIMES, PLUS = range(4)
"""What follows a product before it is rounded."""


@inline
def _finished(product: Any, what: Any, other: Any) -> Any:
    if what == SILU:
        product = silu(product)
    elif what == TIMES:
        product *= load(other)
    elif what == PLUS:
        product += load(other)
    return rounded(product)


@inline
def finish(sums: Any, columns: Any, bias: Any, what: Any, other: Any, out: Any) -> None:
    """What follows the sums of a row at an address, up to 32, rounded to `out`; without a bias its address is 0."""
    of, beside = float32s(sums, (COLUMNS,)), bfloat16s(other, (columns,))
    if bias != 0:
        summand = bfloat16s(bias, (columns,))
        for o in range(columns):
            of[o] += load(summand[o])
    if what == SILU:
        for o in range(COLUMNS):
            of[o] = silu(of[o])
    elif what == TIMES:
        for o in range(columns):
            of[o] *= load(beside[o])
    elif what == PLUS:
        for o in range(columns):
            of[o] += load(beside[o])
    if columns == COLUMNS:
        round_to(sums, out)
    else:
        to = bfloat16s(out, (columns,))
        for o in range(columns):
            to[o] = rounded(of[o])


@Loop
def product(p: Any) -> None:
    """x [N, E] of few rows, weight [O, E], bias [O] -> columns of out [N, W], with `other` [N, W] by the way.

    A row of the weight is read once for all rows of x, and four that lie far from each other at the same time: alone,
    none comes from memory at full speed.
    """
    a = carray(p, (11,))
    rows, width, outputs, whole, what = a[0], a[1], a[2], a[3], a[4]
    x, weight = bfloat16s(a[5], (rows, width)), bfloat16s(a[6], (outputs, width))
    has_bias, bias = a[7] != 0, bfloat16s(a[7], (outputs,))
    column, out, other = a[8], bfloat16s(a[9], (rows, whole)), bfloat16s(a[10], (rows, whole))
    first, last = share(outputs)
    apart = (last - first + 3) // 4
    sums = np.empty(4, np.float32)
    for o in range(first, min(first + apart, last)):
        w0, w1 = weight[o], weight[min(o + apart, last - 1)]
        w2, w3 = weight[min(o + 2 * apart, last - 1)], weight[min(o + 3 * apart, last - 1)]
        for row in range(rows):
            of = x[row]
            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for e in range(width):
                number = load(of[e])
                s0 += number * load(w0[e])
                s1 += number * load(w1[e])
                s2 += number * load(w2[e])
                s3 += number * load(w3[e])
            sums[0], sums[1], sums[2], sums[3] = s0, s1, s2, s3
            for i in range(4):
                at = min(o + i * apart, last - 1)
                total = sums[i] + load(bias[at]) if has_bias else sums[i]
                beside = other[row, column + at] if what >= TIMES else np.uint16(0)
                out[row, column + at] = _finished(total, what, beside)


@Loop
def attention_weights(p: Any) -> None:
    """The elementwise part of causal attention's backward pass: see `tether.kernels.cpu.causal_attention`, where P and
    dS are defined.

    Q K^T and dO V^T [N, W] float32, the logarithmic sum [N] float32, O and dO [N, D] -> P and dS [N, W]. N counts
    matrices of W queries, one below the other; what a query does not see becomes 0.
    """
    a = carray(p, (11,))
    rows, width, size, scale = a[0], a[1], a[2], float_of(a[3])
    scores, grad, log_sum = float32s(a[4], (rows, width)), float32s(a[5], (rows, width)), float32s(a[6], (rows,))
    out, grad_out = bfloat16s(a[7], (rows, size)), bfloat16s(a[8], (rows, size))
    weights, grad_scores = bfloat16s(a[9], (rows, width)), bfloat16s(a[10], (rows, width))
    first, last = share(rows)
    for row in range(first, last):
        of, back, to, to_grad, seen = scores[row], grad[row], weights[row], grad_scores[row], row % width + 1
        of_out, of_grad, along, total = out[row], grad_out[row], np.float32(0), log_sum[row]
        for d in range(size):
            along += load(of_out[d]) * load(of_grad[d])
        for n in range(seen):
            weight = exp(of[n] * scale - total)
            to[n] = rounded(weight)
            to_grad[n] = rounded(weight * (back[n] - along))
        for n in range(seen, width):
            to[n] = to_grad[n] = np.uint16(0)


@inline
def _in_order(number: Any) -> Any:
    """The bits of a bfloat16 as a whole number that is larger for larger ones; back again by the same function."""
    signed = np.int32(np.int16(number))
    return signed ^ ((signed >> np.int32(31)) & np.int32(0x7FFF))


@inline
def _largest(numbers: Any) -> Any:
    """Of bfloat16 numbers, as float32; it may be NaN where one is."""
    largest = np.int32(-0x8000)
    for n in range(len(numbers)):
        largest = max(largest, _in_order(numbers[n]))
    return load(np.uint16(_in_order(np.uint16(largest))))


@Loop
def masses(p: Any) -> None:
    """Logits [N, V] -> their largest [N], and e^(factor * (logit - largest)) summed by blocks [N, B], both float32."""
    a = carray(p, (7,))
    rows, width, block, factor = a[0], a[1], a[2], float_of(a[3])
    blocks = (width + block - 1) // block
    logits, top, sums = bfloat16s(a[4], (rows, width)), float32s(a[5], (rows,)), float32s(a[6], (rows, blocks))
    first, last = share(rows)
    for row in range(first, last):
        of, to, largest = logits[row], sums[row], _largest(logits[row])
        top[row] = largest
        for b in range(blocks):
            part, total = of[b * block : (b + 1) * block], np.float32(0)
            for n in range(len(part)):
                total += exp((load(part[n]) - largest) * factor)
            to[b] = total


@Loop
def log_sums(p: Any) -> None:
    """Logits [N, C] of a chunk, added to what `sums` [N, 4] float32 holds of the chunks before.

    With z = logits * factor: m = max z, sum e^(z-m), sum e^(z-m) (z-m), sum e^2(z-m).
    """
    a = carray(p, (5,))
    rows, width, factor = a[0], a[1], float_of(a[2])
    logits, sums = bfloat16s(a[3], (rows, width)), float32s(a[4], (rows, 4))
    first, last = share(rows)
    for row in range(first, last):
        of, so_far = logits[row], sums[row]
        before, top = so_far[0], _largest(of) * factor
        top = before if before > top else top
        mass, moment, square = np.float32(0), np.float32(0), np.float32(0)
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


@Loop
def log_probs_backward(p: Any) -> None:
    """Logits [N, C] of a chunk -> the gradient with respect to them, in place; `target` [N] is a column or -1.

    `rows` [N, 4] float32: logarithm of the sum, entropy, upstream gradient of log-probability and of entropy.
    """
    a = carray(p, (6,))
    count, width, factor = a[0], a[1], float_of(a[2])
    logits, rows = bfloat16s(a[3], (count, width)), float32s(a[4], (count, 4))
    target = carray(pointer(a[5], np.int64(0)), (count,))
    first, last = share(count)
    for row in range(first, last):
        of, column = logits[row], target[row]
        log_sum, entropy, to_log_prob, to_entropy = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3]
        at_target = np.float32(0)
        if column >= 0:
            log_p = load(of[column]) * factor - log_sum
            at_target = to_log_prob - exp(log_p) * (to_log_prob + to_entropy * (log_p + entropy))
        for n in range(width):
            log_p = load(of[n]) * factor - log_sum
            of[n] = rounded(-exp(log_p) * (to_log_prob + to_entropy * (log_p + entropy)))
        if column >= 0:
            of[column] = rounded(at_target)


@inline
def _load_four(rows: Any, first: Any, last: Any, four: Any, width: Any) -> None:
    """Rows `first` to `first + 3`, the last one again where there are no more -> float32 [4, width]."""
    for i in range(4):
        of, to = rows[min(first + i, last)], four[i]
        for d in range(width):
            to[d] = load(of[d])


@inline
def softmax(scores: Any, seen: Any, softcap: Any) -> None:
    """In place over the first `seen`; what follows up to the next four becomes 0."""
    padded = (seen + 3) // 4 * 4
    if softcap > 0:
        for n in range(padded):
            scores[n] = capped(scores[n], softcap)
    m0, m1, m2, m3 = scores[0], scores[1], scores[2], scores[3]
    for n in range(4, padded, 4):  # four chains: each comparison waits for the one before
        m0 = scores[n] if scores[n] > m0 else m0
        m1 = scores[n + 1] if scores[n + 1] > m1 else m1
        m2 = scores[n + 2] if scores[n + 2] > m2 else m2
        m3 = scores[n + 3] if scores[n + 3] > m3 else m3
    largest, total = max(max(m0, m1), max(m2, m3)), np.float32(0)
    for n in range(seen):
        scores[n] = exp(scores[n] - largest)
        total += scores[n]
    for n in range(seen):
        scores[n] /= total
    for n in range(seen, padded):
        scores[n] = np.float32(0)


@inline
def copy(address: Any, count: Any, to: Any) -> None:
    """So many bfloat16 numbers."""
    of, out = bfloat16s(address, (count,)), bfloat16s(to, (count,))
    for n in range(count):
        out[n] = of[n]


@inline
def weigh(scores: Any, before: Any, seen: Any, softcap: Any, weights: Any) -> None:
    """Scores of a query -> its weights, rounded; 0 for the keys before, and for those after up to a multiple of 32."""
    of, end = scores[before:], before + seen
    for n in range(seen, seen + 3):  # up to which `softmax` may look
        of[n] = of[seen - 1]
    softmax(of, seen, softcap)
    for n in range(before):
        weights[n] = np.uint16(0)
    for n in range(seen):
        weights[before + n] = rounded(of[n])
    for n in range(end, (end + COLUMNS - 1) // COLUMNS * COLUMNS):
        weights[n] = np.uint16(0)


@Loop
def attend(p: Any) -> None:
    """One new token a row: its key and value go into the cache, its queries over the keys that it sees.

    query [R, K * G, D], key [R, K, D] and value [R, K, E] may be views with strides; keys [R, K, C, D] and values
    [R, K, C, E] are the cache, position [R] int64, out [R, K * G, E]. A thread has a share of the R * K key heads. Four
    keys at a time are made float32 once for the G queries that share them.
    """
    a = carray(p, (22,))
    rows, kv_heads, groups, size, value_size, capacity = a[0], a[1], a[2], a[3], a[4], a[5]
    scale, softcap, window = float_of(a[6]), float_of(a[7]), a[8]
    position = carray(pointer(a[9], np.int64(0)), (rows,))
    all_keys = bfloat16s(a[10], (rows * kv_heads, capacity, size))
    all_values = bfloat16s(a[11], (rows * kv_heads, capacity, value_size))
    out = bfloat16s(a[12], (rows, kv_heads * groups, value_size))
    query, scores = np.empty((groups, size), np.float32), np.empty((groups, capacity + 3), np.float32)
    sums, four = np.empty((groups, value_size), np.float32), np.empty((4, max(size, value_size)), np.float32)
    f0, f1, f2, f3 = four[0], four[1], four[2], four[3]
    first, last = share(rows * kv_heads)
    for task in range(first, last):
        row, head, keys, values = task // kv_heads, task % kv_heads, all_keys[task], all_values[task]
        here = position[row]
        start = max(0, here + 1 - window) if window > 0 else 0
        seen = here + 1 - start
        copy(a[16] + 2 * (row * a[17] + head * a[18]), size, a[10] + 2 * (task * capacity + here) * size)
        copy(a[19] + 2 * (row * a[20] + head * a[21]), value_size, a[11] + 2 * (task * capacity + here) * value_size)
        for group in range(groups):
            new = bfloat16s(a[13] + 2 * (row * a[14] + (head * groups + group) * a[15]), (size,))
            of, to_sums = query[group], sums[group]
            for d in range(size):
                of[d] = load(new[d]) * scale
            for d in range(value_size):
                to_sums[d] = np.float32(0)

        for n in range(0, seen, 4):
            _load_four(keys, start + n, here, four, size)
            for group in range(groups):
                of, to_scores = query[group], scores[group]
                s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                for d in range(size):
                    s0 += of[d] * f0[d]
                    s1 += of[d] * f1[d]
                    s2 += of[d] * f2[d]
                    s3 += of[d] * f3[d]
                to_scores[n], to_scores[n + 1], to_scores[n + 2], to_scores[n + 3] = s0, s1, s2, s3
        for group in range(groups):
            softmax(scores[group], seen, softcap)
        for n in range(0, seen, 4):
            _load_four(values, start + n, here, four, value_size)
            for group in range(groups):
                of, to_sums = scores[group], sums[group]
                s0, s1, s2, s3 = of[n], of[n + 1], of[n + 2], of[n + 3]
                for d in range(value_size):
                    to_sums[d] += s0 * f0[d] + s1 * f1[d] + s2 * f2[d] + s3 * f3[d]
        for group in range(groups):
            of, to = sums[group], out[row, head * groups + group]
            for d in range(value_size):
                to[d] = rounded(of[d])
