"""Gated MLPs, ``down(silu(gate(x)) * up(x))``, that save less for the backward pass than transformers' modules do."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from tether.kernels import kernels_for
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
        gate, up = self.gate_proj(x), self.up_proj(x)
        return kernels_for(gate, up).gated_mlp(gate, up, self.down_proj)


def replace_gated_mlps(model: PreTrainedModel) -> None:
    """Put a `GatedMLP` in the place of every module named in `REPLACED` whose activation is SiLU; parameters stay."""
    replace_modules(model, REPLACED, lambda mlp: GatedMLP(mlp) if isinstance(mlp.act_fn, SiLUActivation) else mlp)
