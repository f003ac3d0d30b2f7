"""RMS norms with a gradient of our own, in place of transformers' modules.

transformers writes an RMS norm as six tensor operations; autograd saves most of their results and goes back through all
of them. Here one number per row is saved. It is also exact in float64, where transformers' norms compute in float32: a
prompt that several responses share then has the very gradient that it has when it is repeated.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.kernels import kernels_for
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


class RMSNorm(nn.Module):
    """See `tether.kernels.reference.Reference.rms_norm`.

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
        return kernels_for(x, self.weight).rms_norm(x, self.weight, self.eps, self.offset)


def replace_norms(model: PreTrainedModel) -> None:
    """Put an `RMSNorm` in the place of every module named in `OFFSETS`; parameters and their names stay."""
    replace_modules(model, OFFSETS, _ours)


def _ours(norm: Any) -> RMSNorm:
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return RMSNorm(norm.weight, eps, OFFSETS[type(norm).__name__])
