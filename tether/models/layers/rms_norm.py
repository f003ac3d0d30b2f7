"""RMS norms with a gradient of our own, in place of transformers' modules.

transformers writes an RMS norm as six tensor operations; autograd keeps most of their results and goes back through all
of them. Here one number a row is kept. It is also exact in float64, where transformers' norms compute in float32: a
prompt that several responses share then has the very gradient that it has when it is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from tether.kernels.dispatch import loops_for
from tether.models.layers.module_swap import replace_modules

OFFSETS = {
    "LlamaRMSNorm": 0.0,
    "MistralRMSNorm": 0.0,
    "Qwen2RMSNorm": 0.0,
    "Qwen3RMSNorm": 0.0,
    "Qwen2MoeRMSNorm": 0.0,
    "Qwen3MoeRMSNorm": 0.0,
    "DeepseekV3RMSNorm": 0.0,
    "Gemma2RMSNorm": 1.0,
    "Gemma3RMSNorm": 1.0,
}
"""transformers' module -> what it adds to its weight. Where that is 0 it rounds before the weight, else after."""


_CACHED = 1 << 17  # numbers of a few rows
_ROWS_A_SUM = 64  # of the weight's gradient: a fixed number, so that it does not depend on the threads


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * (weight + offset)`` over the last dimension, computed in at least float32.

    Args:
        weight: the parameter of the module that this one replaces.
        eps: under the root.
        offset: see `OFFSETS`.
    """

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [.., E]."""
        if not torch.is_grad_enabled():
            return _normalised(x, self.weight, self.eps, self.offset)[0]
        normed: Tensor = _RMSNorm.apply(x, self.weight, self.eps, self.offset)
        return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        x = x.contiguous()
        out, scale = _normalised(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """With n = x * scale: d weight = sum grad n, dx = scale (g - n mean(g n)) for g = grad * (weight + offset)."""
        x, weight, scale = ctx.saved_tensors
        grad, grad_x = grad.contiguous(), torch.empty_like(x)
        loops = loops_for(x, weight, grad)
        if loops is None:
            grad_weight = _go_back(x, weight, scale, ctx.offset, grad, grad_x, ctx.needs_input_grad[1])
        else:
            rows, width = scale.numel(), x.shape[-1]
            parts = scale.new_zeros(-(-rows // _ROWS_A_SUM), width)
            loops.rms_norm_backward(rows, width, len(parts), ctx.offset, x, weight, scale, grad, grad_x, parts)
            grad_weight = parts.sum(0)
        return grad_x, grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None


def _normalised(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """What comes out, and the factor 1 / sqrt(mean(x^2) + eps) of each row."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    scale = x.new_empty(*x.shape[:-1], 1, dtype=torch.promote_types(x.dtype, torch.float32))
    loops = loops_for(x, weight)
    if loops is not None:
        heads = x if x.dim() == 3 and x.stride()[1:] == (x.shape[2], 1) else x.contiguous().view(-1, 1, x.shape[-1])
        loops.rms_norm(*heads.shape, offset, eps, heads, weight, out, scale, heads.stride(0))
        return out, scale
    # A few rows at a time, so that what is computed in between stays in the cache.
    for rows, row_scale, normed in _few_rows(x, scale, out):
        exact = rows.to(scale.dtype)
        mean_square = torch.linalg.vecdot(exact, exact).div_(x.shape[-1])
        row_scale.copy_(mean_square.add_(eps).rsqrt_().unsqueeze(-1))
        if offset == 0:
            torch.mul(torch.mul(exact, row_scale).to(x.dtype), weight, out=normed)
        else:
            normed.copy_((exact * row_scale).mul_(weight.to(exact.dtype) + offset))
    return out, scale


def _go_back(
    x: Tensor, weight: Tensor, scale: Tensor, offset: float, grad: Tensor, grad_x: Tensor, needs_weight: bool
) -> Tensor:
    """Fill `grad_x`; the gradient of the weight, if it is needed."""
    grad_weight = scale.new_zeros(weight.shape)
    factor = weight.to(scale.dtype) + offset
    for rows, row_scale, row_grad, row_grad_x in _few_rows(x, scale, grad, grad_x):
        normed = rows.to(scale.dtype) * row_scale
        exact = row_grad.to(scale.dtype)
        if needs_weight:
            grad_weight += torch.mul(exact, normed).sum(0)
        g = exact * factor
        along = torch.linalg.vecdot(g, normed).div_(-x.shape[-1]).unsqueeze(-1)
        row_grad_x.copy_(g.addcmul_(normed, along).mul_(row_scale))
    return grad_weight


def _few_rows(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor [.., width], at a time; all at once where each operation is a kernel to launch."""
    flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, *others)]
    at_once = max(1, _CACHED // x.shape[-1]) if x.device.type == "cpu" else max(1, len(flat[0]))
    return zip(*(rows.split(at_once) for rows in flat), strict=True)


def replace_norms(model: PreTrainedModel) -> None:
    """Put an `RMSNorm` in the place of every module named in `OFFSETS`; parameters and their names stay."""
    replace_modules(model, OFFSETS, _ours)


def _ours(norm: Any) -> RMSNorm:
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return RMSNorm(norm.weight, eps, OFFSETS[type(norm).__name__])
