"""Attention in plain PyTorch: under any mask, and causal on a CPU with PyTorch's flash kernels.

The flash backward kernel multiplies small blocks. On the short sequences of reinforcement learning it takes far longer
than its arithmetic, so a backward pass of our own recomputes the scores of several rows at a time as full matrices,
which large matrix products handle well.

Legend: R rows, W tokens, K key/value heads, H = K * G query heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tether.kernels.attention_spec import AttentionSpec
from tether.types import AutogradContext


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
