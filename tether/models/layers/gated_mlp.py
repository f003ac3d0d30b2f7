"""Gated MLPs, ``down(silu(gate(x)) * up(x))``, that keep less for the way back than transformers' modules do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from tether.kernels.dispatch import loops_for
from tether.models.layers.module_swap import replace_modules

REPLACED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""transformers' modules of this form."""


class GatedMLP(nn.Module):
    """Takes the place of one of `REPLACED`, with its layers under their names."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.config, self.act_fn = mlp.config, mlp.act_fn
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [.., E] -> [.., E]."""
        gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
        if loops_for(gate, up) is None:
            return down(F.silu(gate) * up)
        if type(down) is nn.Linear and down.bias is None and loops_for(down.weight):
            return _gated_down(gate.contiguous(), up.contiguous(), down.weight)
        return down(_Gated.apply(gate.contiguous(), up.contiguous()))


class _Gated(torch.autograd.Function):
    """silu(gate) * up; only `gate` and `up` are kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return _go_back(gate, up, grad)


class _GatedDown(torch.autograd.Function):
    """The way back of `_gated_down`, which fills in what comes out."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return gate.new_empty(*gate.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        *needs_input, needs_weight = ctx.needs_input_grad
        grad_weight = grad.flatten(0, -2).T @ _gated(gate, up).flatten(0, -2) if needs_weight else None
        grads = _go_back(gate, up, grad @ weight) if any(needs_input) else (None, None)
        return *grads, grad_weight


def _gated_down(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) * up) @ weight.T; only `gate` and `up` are kept, and their product is made again on the way back."""
    out: Tensor = _GatedDown.apply(gate, up, weight)
    # After the tensors are kept: a layer that is recomputed stops there, before the product that it does not need.
    with torch.no_grad():
        torch.mm(_gated(gate, up).flatten(0, -2), weight.T, out=out.flatten(0, -2))
    return out


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up by a loop."""
    out = torch.empty_like(gate)
    loops: Any = loops_for(gate, up)
    loops.gated(gate.numel(), gate, up, out)
    return out


def _go_back(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """With s = sigmoid(gate): d gate = grad * up * s * (1 + gate * (1 - s)), d up = grad * gate * s."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    loops: Any = loops_for(gate, up)
    loops.gated_backward(gate.numel(), gate, up, grad.contiguous(), grad_gate, grad_up)
    return grad_gate, grad_up


def replace_gated_mlps(model: PreTrainedModel) -> None:
    """Put a `GatedMLP` in the place of every module named in `REPLACED` whose activation is SiLU; parameters stay."""
    replace_modules(model, REPLACED, lambda mlp: GatedMLP(mlp) if isinstance(mlp.act_fn, SiLUActivation) else mlp)
