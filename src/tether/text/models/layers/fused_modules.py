"""RMS norms and gated MLPs that replace transformers' modules before a model is used; parameters and names stay.

transformers computes an RMS norm with six tensor operations; autograd saves most of their results and differentiates
each of them. Here one number per row is saved. It is also exact in float64, where transformers' norms compute in
float32: a prompt that several responses share then has exactly the same gradient as when it is repeated. A gated MLP,
``down(silu(gate(x)) * up(x))``, also saves less for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from tether.kernels import kernels_for

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
"""transformers' module -> offset that it adds to its weight. With offset 0 it rounds before the weight, else after."""
GATED_MLPS = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""transformers' modules that are gated MLPs."""


def replace_modules(model: nn.Module, classes: Container[str], replacement: Callable[[Any], nn.Module]) -> None:
    """Replace modules whose class is named in `classes` by `replacement(module)`; train or eval mode is preserved."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ in classes:
                new = replacement(child)
                new.training = child.training
                setattr(parent, name, new)


class RMSNorm(nn.Module):
    """RMS norm computed with `tether.kernels.reference.Reference.rms_norm`.

    Args:
        weight: the parameter of the replaced module.
        eps: constant added to the mean square.
        offset: offset of the weight, as in `OFFSETS`.
    """

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [.., E]."""
        return kernels_for(x, self.weight).rms_norm(x, self.weight, self.eps, self.offset)


def replace_norms(model: PreTrainedModel) -> None:
    """Replace every module named in `OFFSETS` by an `RMSNorm`; parameters and their names stay."""
    replace_modules(model, OFFSETS, _rms_norm)


def _rms_norm(norm: Any) -> RMSNorm:
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return RMSNorm(norm.weight, eps, OFFSETS[type(norm).__name__])


class GatedMLP(nn.Module):
    """Replacement for one of `GATED_MLPS`, with its layers under their names."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.config, self.act_fn = mlp.config, mlp.act_fn
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., E] for hidden states [.., E]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        return kernels_for(gate, up).gated_mlp(gate, up, self.down_proj)


def replace_gated_mlps(model: PreTrainedModel) -> None:
    """Replace every module named in `GATED_MLPS` with SiLU activation by a `GatedMLP`; parameters stay."""
    replace_modules(model, GATED_MLPS, lambda mlp: GatedMLP(mlp) if isinstance(mlp.act_fn, SiLUActivation) else mlp)
