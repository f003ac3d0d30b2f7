"""Causal attention on a CPU: PyTorch's flash kernels, with the backward one in the number format that is faster.

The bfloat16 backward kernel takes two to three times as long as the float32 one on the short sequences of reinforcement
learning, and no longer from about 300 tokens on. It is called in float32 there, which also rounds less.

Legend: R rows, W tokens, K key/value heads, H = K * G query heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_SHORT = 256  # tokens
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """``softmax(scale * query @ key^T) @ value``, each query over its own key and those before.

    Args:
        query: [R, H, W, D] on the CPU.
        key: [R, K, W, D]; G query heads share one of its heads.
        value: [R, K, W, D].
        scale: of the scores.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast leaves rotated ones in float32
    attended: Tensor = _CausalAttention.apply(query, key, value, scale)
    return attended


class _CausalAttention(torch.autograd.Function):
    """Keeps keys and values as they are, not repeated for each query head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        out, log_sum = _forward(query, *_repeated(groups, key, value), 0.0, True, attn_mask=None, scale=scale)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.scale, ctx.groups = scale, groups
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        dtype = torch.promote_types(query.dtype, torch.float32) if query.shape[2] < _SHORT else query.dtype
        grad, q, k, v, o = (x.to(dtype) for x in (grad, query, key, value, out))
        grads = _backward(grad, q, *_repeated(ctx.groups, k, v), o, log_sum, 0.0, True, attn_mask=None, scale=ctx.scale)
        grad_query, *by_head = grads
        grad_key, grad_value = (x.unflatten(1, (-1, ctx.groups)).sum(dim=2).to(query.dtype) for x in by_head)
        return grad_query.to(query.dtype), grad_key, grad_value, None


def _repeated(groups: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if groups == 1 else tuple(x.repeat_interleave(groups, dim=1) for x in tensors)
