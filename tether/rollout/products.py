"""Linear layers for decoding: those that read the same input as one product, and what follows them inside it.

On a CPU in bfloat16 oneDNN wants a weight in blocks. From a plain weight it makes them anew at every call, which for
the few rows of a decoding step can cost as much as the product. A `Product` keeps the blocks: a copy of the weights,
refreshed after each update, and oneDNN then also does the activation, the gating or the residual sum before it rounds.
Elsewhere the layers' own weights are used and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROWS = 64  # what oneDNN chooses the shape of its blocks for


def has_blocked_products(weight: Tensor) -> bool:
    """Whether products with this weight are faster from blocks: bfloat16 on a CPU that multiplies it natively."""
    is_bfloat16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return is_bfloat16 and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Product:
    """The outputs of some linear layers, one after the other: [N, E] -> [N, sum of their widths].

    Args:
        layers: they read the same input.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        self._blocked: Tensor | None = None
        self._bias: Tensor | None = None
        self.refresh()

    def refresh(self) -> None:
        """Take over the layers' current weights."""
        if has_blocked_products(self._layers[0].weight):
            weight = torch.cat([layer.weight.detach() for layer in self._layers])
            self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
            biases = [layer.bias.detach() for layer in self._layers if layer.bias is not None]
            self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        if self._blocked is None:
            return self._plain(x)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocked, self._bias, "none", [], "")
        return product

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""
        if self._blocked is None:
            return F.silu(self._plain(x))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocked, self._bias, "swish", [], "")
        return product

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The product times `factor`."""
        if self._blocked is None:
            return self._plain(x).mul_(factor)
        product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, factor, self._blocked, self._bias, "mul")
        return product

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        """The product plus `summand`."""
        if self._blocked is None:
            return self._plain(x).add_(summand)
        product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, summand, self._blocked, self._bias, "add")
        return product

    def _plain(self, x: Tensor) -> Tensor:
        outputs = [F.linear(x, layer.weight, layer.bias) for layer in self._layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
