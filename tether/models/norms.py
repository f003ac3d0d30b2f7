"""RMS norms with a gradient of our own, in place of transformers' modules.

transformers writes an RMS norm as six tensor operations; autograd keeps most of their results and goes back through all
of them. Here one number a row is kept. It is also exact in float64, where transformers' norms compute in float32: a
prompt that several responses share then has the very gradient that it has when it is repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

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
        normed: Tensor = _RMSNorm.apply(x, self.weight, self.eps, self.offset)
        return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vecdot(exact, exact).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        if offset == 0:
            return torch.mul(exact, scale).to(x.dtype) * weight
        return (exact * scale).mul_(weight.to(exact.dtype) + offset).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """With n = x * scale: d weight = sum grad n, dx = scale (g - n mean(g n)) for g = grad * (weight + offset)."""
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        exact = grad.to(scale.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.mul(exact, normed).flatten(0, -2).sum(0).to(weight.dtype)
        g = exact * (weight.to(scale.dtype) + ctx.offset)
        along = torch.linalg.vecdot(g, normed).div_(-x.shape[-1]).unsqueeze(-1)
        return g.addcmul_(normed, along).mul_(scale).to(x.dtype), grad_weight, None, None


def replace_norms(model: PreTrainedModel) -> None:
    """Put an `RMSNorm` in the place of every module named in `OFFSETS`; parameters and their names stay."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            offset = OFFSETS.get(type(child).__name__)
            if offset is not None:
                eps = child.eps if hasattr(child, "eps") else child.variance_epsilon
                setattr(parent, name, RMSNorm(child.weight, eps, offset).train(child.training))  # type: ignore[arg-type]
