"""Attention in plain PyTorch: under any mask, and causal on a CPU with PyTorch's flash kernels.

The flash backward kernel multiplies small blocks. On the short sequences of reinforcement learning it takes far longer
than its arithmetic, so a backward pass of our own recomputes the scores of several rows at a time as full matrices,
which large matrix products handle well.

Legend: R rows, W tokens, K key/value heads, H = K * G query heads, D head size.

Conversion between packed tokens and the padded batches that attention runs on.

Sequences of similar length run together as a padded batch, because one kernel call for each would cost more than the
padding. A prompt that several responses continue occurs once among the packed tokens, but in each of their sequences::

    tokens     [ p0 p1 | a0 a1 | b0 ]          a prompt of two tokens and its two responses
    sequences    p0 p1   a0 a1                 one batch of two rows; padding repeats a sequence's last token,
                 p0 p1   b0 (b0)               at positions that no causal query sees

PyTorch's own gradient of an indexed tensor adds one number at a time, and in fp32 in no fixed order. The functions here
add full rows, in fp32 and in the order of the sequences.

Legend: N = tokens, P = slots in all batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from tether.types import AutogradContext


@dataclass(frozen=True)
class AttentionSpec:
    """Settings of one attention layer."""

    layer: int
    scale: float
    sliding_window: int | None = None  # a query sees itself and the window - 1 keys before it
    softcap: float | None = None  # Gemma 2: scores become softcap * tanh(scores / softcap)


class AttentionLayout(Protocol):
    """Decides which query sees which key."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend with query [R, H, Q, D], key and value [R, K, Q, D] of the same tokens and return [R, H, Q, Dv]."""
        ...


Ints: TypeAlias = NDArray[np.int64]
LIKE_LENGTH = 0.75
"""A sequence joins a batch if its length is at least this fraction of the batch's longest sequence."""


@dataclass(frozen=True)
class PaddedBatches:
    """The slots of each token; built by `padded_batches`."""

    token: Tensor  # [P] the token in a slot
    first: Tensor  # [N] the first slot of a token
    unread: Tensor  # [P] bool: the slot is not the first one of its token, so its attention output is not used
    repeats: tuple[tuple[Tensor, Tensor], ...]
    """Tokens and their second slots, then tokens and their third slots, and so on; without padding."""
    shapes: tuple[tuple[int, int], ...]
    """Rows and width of each batch."""

    def spread(self, per_token: Tensor) -> Tensor:
        """Copy [N, ..] to all slots [P, ..]; the gradient of a token is the sum over its slots."""
        spread: Tensor = _Spread.apply(per_token, self)
        return spread

    def collect(self, per_slot: Tensor) -> Tensor:
        """Read [N, ..] from the first slot of each token in [P, ..]."""
        collected: Tensor = _Collect.apply(per_slot, self)
        return collected

    def batches(self, per_slot: Tensor) -> list[Tensor]:
        """Split [P, ..] into one [rows, width, ..] for each batch."""
        batches = per_slot.split([rows * width for rows, width in self.shapes])
        return [batch.unflatten(0, shape) for batch, shape in zip(batches, self.shapes, strict=True)]


@lru_cache(maxsize=8)  # every layer asks for the same batches, forward and backward
def padded_batches(
    lengths: tuple[int, ...], prefixes: tuple[int | None, ...] | None, device: torch.device
) -> PaddedBatches:
    """Return the batches of the sequences that `tether.text.models.layers.Packed` describes."""
    starts = list(itertools.accumulate(lengths, initial=0))
    spans = [np.arange(start, stop) for start, stop in itertools.pairwise(starts)]
    if prefixes is None:
        sequences = spans
    else:
        continued = set(prefixes)
        chains = [(prefix, segment) for segment, prefix in enumerate(prefixes) if segment not in continued]
        sequences = [
            spans[segment] if prefix is None else np.concatenate([spans[prefix], spans[segment]])
            for prefix, segment in chains
        ]
    tokens, real, shapes = [], [], []
    for group in _of_like_length(sequences):
        width = len(group[0])
        shapes.append((len(group), width))
        for sequence in group:
            tokens.append(sequence[np.minimum(np.arange(width), len(sequence) - 1)])
            real.append(np.arange(width) < len(sequence))
    return _slots(np.concatenate(tokens), np.concatenate(real), tuple(shapes), device)


@lru_cache(maxsize=8)
def with_prefixes(lengths: tuple[int, ...], prefixes: tuple[int | None, ...], device: torch.device) -> PaddedBatches:
    """Return one row without padding in which each segment follows its prefix."""
    starts = list(itertools.accumulate(lengths, initial=0))
    spans = [np.arange(start, stop) for start, stop in itertools.pairwise(starts)]
    before = [[spans[prefix]] if prefix is not None else [] for prefix in prefixes]
    token = np.concatenate([span for prefix, segment in zip(before, spans, strict=True) for span in (*prefix, segment)])
    return _slots(token, np.ones(len(token), dtype=bool), ((1, len(token)),), device)


def _slots(
    token: Ints, is_real: NDArray[np.bool_], shapes: tuple[tuple[int, int], ...], device: torch.device
) -> PaddedBatches:
    """Return the slots of each token, computed from the token in each slot and whether the slot is not padding."""
    (_, first), *repeats = _occurrences(token, is_real)
    unread = np.ones(len(token), dtype=bool)
    unread[first] = False

    def moved(x: NDArray[np.generic]) -> Tensor:
        return torch.tensor(x.tolist(), device=device)  # under FakeTensorMode an array would have no values

    on_device = tuple((moved(owner), moved(slot)) for owner, slot in repeats)
    return PaddedBatches(moved(token), moved(first), moved(unread), on_device, shapes)


def _of_like_length(sequences: Sequence[Ints]) -> list[list[Ints]]:
    """Group sequences by similar length, the longest sequence of each group first."""
    groups: list[list[Ints]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        if not groups or len(sequence) < LIKE_LENGTH * len(groups[-1][0]):
            groups.append([])
        groups[-1].append(sequence)
    return groups


def _occurrences(token: Ints, is_real: NDArray[np.bool_]) -> list[tuple[Ints, Ints]]:
    """Return (tokens, their n-th slots) for n = 1, 2, ..; an entry has no token twice, and the first entry has all."""
    slot = is_real.nonzero()[0]
    order = slot[token[slot].argsort(kind="stable")]  # sorted by token
    owner, start, count = np.unique(token[order], return_index=True, return_counts=True)
    return [(owner[count > n], order[start[count > n] + n]) for n in range(count.max())]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, per_token: Tensor, batches: PaddedBatches) -> Tensor:
        ctx.batches = batches
        return per_token.index_select(0, batches.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        batches: PaddedBatches = ctx.batches
        total = grad.index_select(0, batches.first)
        if not batches.repeats:
            return total, None
        exact = total.to(torch.promote_types(total.dtype, torch.float32))
        for token, slot in batches.repeats:
            exact[token] += grad.index_select(0, slot)
        return exact.to(grad.dtype), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, per_slot: Tensor, batches: PaddedBatches) -> Tensor:
        ctx.batches = batches
        return per_slot.index_select(0, batches.first)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        batches: PaddedBatches = ctx.batches
        spread = grad.index_select(0, batches.token)
        return spread.masked_fill_(batches.unread.view(-1, *[1] * (grad.ndim - 1)), 0.0), None


def select_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return ``rows[index]`` of [N, E]; the gradient adds up in at least fp32 where an index occurs more than once."""
    selected: Tensor = _SelectRows.apply(rows, index)
    return selected


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        exact = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return exact.new_zeros(ctx.count, grad.shape[1]).index_add_(0, index, exact).to(grad.dtype), None


def visible_keys(query_position: Tensor, key_position: Tensor, spec: AttentionSpec) -> Tensor:
    """Return a boolean [..., Q, L]: whether each query sees each key, which is causal and limited to the sliding
    window."""
    distance = query_position[..., :, None] - key_position[..., None, :]
    visible = distance >= 0
    if spec.sliding_window is not None:
        visible &= distance < spec.sliding_window
    return visible


def masked_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, spec: AttentionSpec) -> Tensor:
    """Return grouped-query attention under a boolean mask `visible`, which broadcasts over [R, K, G, Q, L].

    Query heads are grouped by the key head that they share, so keys and values are never repeated.
    """
    rows, heads, width, size = query.shape
    kv_heads = key.shape[1]
    grouped = query.view(rows, kv_heads, heads // kv_heads, width, size)
    key, value = key.unsqueeze(2), value.unsqueeze(2)
    if spec.softcap is None:
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=visible, scale=spec.scale)
    else:
        scores = torch.matmul(grouped, key.transpose(-1, -2)) * spec.scale
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores.masked_fill(~visible, -math.inf)
        out = torch.matmul(
            scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype),
            value,
        )
    return out.reshape(rows, heads, width, value.shape[-1])


WeightsBackward: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Signature of `weights_backward`."""
_SHORT = 384  # tokens; for longer sequences PyTorch's kernel is faster
_SCORES = 1 << 20  # number of scores computed at once, so that they stay in the cache
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, weights_backward: WeightsBackward
) -> Tensor:
    """Return ``softmax(scale * query @ key^T) @ value`` where each query attends to its own and earlier keys.

    Args:
        query: [R, H, W, D] on the CPU.
        key: [R, K, W, D]; G query heads share one of its heads.
        value: [R, K, W, D].
        scale: factor of the scores.
        weights_backward: the function of this name, or a compiled kernel with the same signature.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast leaves rotated queries and keys in float32
    attended: Tensor = _CausalAttention.apply(query, key, value, scale, weights_backward)
    return attended


class _CausalAttention(torch.autograd.Function):
    """Saves keys and values unrepeated, not once for each query head."""

    @staticmethod
    def forward(
        ctx: AutogradContext, query: Tensor, key: Tensor, value: Tensor, scale: float, weights_backward: WeightsBackward
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        out, log_sum = _forward(query, *_repeated(groups, key, value), 0.0, True, attn_mask=None, scale=scale)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.scale, ctx.groups, ctx.weights_backward = scale, groups, weights_backward
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        if query.shape[2] < _SHORT:
            grads = _short_backward(grad, query, key, value, out, log_sum, ctx.scale, ctx.weights_backward)
            return *grads, None, None
        keys, values = _repeated(ctx.groups, key, value)
        grads = _backward(grad, query, keys, values, out, log_sum, 0.0, True, attn_mask=None, scale=ctx.scale)
        grad_query, *by_head = grads
        grad_key, grad_value = (x.unflatten(1, (-1, ctx.groups)).sum(dim=2) for x in by_head)
        return grad_query, grad_key, grad_value, None, None


def _short_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    scale: float,
    weights_backward: WeightsBackward,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    With P = exp(scale Q K^T - log_sum) under the diagonal and dO the gradient of the output (Dao et al.,
    "FlashAttention", 2022, appendix B.2)::

        dV = P^T dO    dS = P * (dO V^T - rowsum(dO * O))    dQ = scale dS K    dK = scale dS^T Q

    Q K^T goes into an exponent, and from dO V^T a number of similar size is subtracted: these two are computed in at
    least float32, the others in the dtype of the tensors.

    Args:
        grad: [R, H, W, D] gradient of the output.
        query: [R, H, W, D].
        key: [R, K, W, D].
        value: [R, K, W, D].
        out: [R, H, W, D].
        log_sum: [R, H, W] logarithm of the sum of the exponentials of each query's scores.
        scale: factor of the scores.
        weights_backward: as in `causal_attention`.
    """
    rows, heads, width, _ = query.shape
    groups = (key.shape[1], heads // key.shape[1])
    exact = log_sum.dtype
    outputs = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    inputs = (query, key, value, grad, out, log_sum)
    at_once = max(1, _SCORES // (heads * width * width))
    for first in range(0, rows, at_once):
        chosen = slice(first, first + at_once)
        # The G query heads of one key head are stacked: [r * K, G * W, ..].
        q, k, v, g, o, log_s = (
            (x[chosen].unflatten(1, groups).flatten(2, 3) if x.shape[1] == heads else x[chosen]).flatten(0, 1)
            for x in inputs
        )
        scores, grad_weights = torch.bmm(q.to(exact), k.to(exact).mT), torch.bmm(g.to(exact), v.to(exact).mT)
        p, s = weights_backward(scores, grad_weights, log_s, o, g, scale)
        by_head = (torch.bmm(s, k).mul_(scale), torch.bmm(s.mT, q).mul_(scale), torch.bmm(p.mT, g))
        for target, values in zip(outputs, by_head, strict=True):
            target[chosen] = values.view(target[chosen].shape)
    return outputs


def weights_backward(
    scores: Tensor, grad_weights: Tensor, log_sum: Tensor, out: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return P and dS of `_short_backward` [B, G * W, W]; Q K^T and dO V^T are overwritten."""
    width, dtype = scores.shape[2], grad.dtype
    weights = scores.mul_(scale).sub_(log_sum[..., None]).exp_()
    weights.unflatten(1, (-1, width)).tril_()
    along = torch.linalg.vecdot(grad.to(scores.dtype), out.to(scores.dtype))
    return weights.to(dtype), grad_weights.sub_(along[..., None]).mul_(weights).to(dtype)


def _repeated(groups: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if groups == 1 else tuple(x.repeat_interleave(groups, dim=1) for x in tensors)
