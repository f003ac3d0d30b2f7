"""Gated MLPs, ``down(silu(gate(x)) * up(x))``, that keep less for the way back than transformers' modules do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from tether.models.cpu import loops_for
from tether.models.replace import replace_modules

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
        gate, up = self.gate_proj(x), self.up_proj(x)
        if loops_for(gate, up) is None:
            return self.down_proj(F.silu(gate) * up)
        return self.down_proj(_Gated.apply(gate, up))


class _Gated(torch.autograd.Function):
    """silu(gate) * up by a loop; only `gate` and `up` are kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        loops: Any = loops_for(gate, up)
        loops.gated(gate.numel(), gate, up, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """With s = sigmoid(gate): d gate = grad * up * s * (1 + gate * (1 - s)), d up = grad * gate * s."""
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        loops: Any = loops_for(gate, up)
        loops.gated_backward(gate.numel(), gate, up, grad.contiguous(), grad_gate, grad_up)
        return grad_gate, grad_up


def replace_gated_mlps(model: PreTrainedModel) -> None:
    """Put a `GatedMLP` in the place of every module named in `REPLACED` whose activation is SiLU; parameters stay."""
    replace_modules(model, REPLACED, lambda mlp: GatedMLP(mlp) if isinstance(mlp.act_fn, SiLUActivation) else mlp)
