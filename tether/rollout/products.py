"""Linear layers for decoding: those that read the same input as one product, and what follows them inside it.

On a CPU in bfloat16 oneDNN wants a weight in blocks. From a plain weight it makes them anew at every call, which for
the few rows of a decoding step can cost as much as the product. A `Product` keeps the blocks: a copy of the weights,
refreshed after each update, and oneDNN then also does the activation, the gating or the residual sum before it rounds.
A row or two are multiplied by a loop of our own, which reads plain weights as fast as memory gives them. Elsewhere the
layers' own weights are used and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tether.models.cpu import loops_for

_ROWS = 64  # what oneDNN chooses the shape of its blocks for
FEW_ROWS = 2
"""Rows up to which a loop of ours is faster than oneDNN."""

_AFTER = {"none": "PLAIN", "swish": "SILU", "mul": "TIMES", "add": "PLUS"}
"""oneDNN's name for what follows a product -> that of `tether.models.loops`."""


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
        self._blocked = None  # first, so that the new blocks take the memory of the old
        if has_blocked_products(self._layers[0].weight):
            weights = [layer.weight.detach() for layer in self._layers]
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
            biases = [layer.bias.detach() for layer in self._layers if layer.bias is not None]
            self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return self._product(x, "none", None)

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""
        return self._product(x, "swish", None)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The product times `factor`."""
        return self._product(x, "mul", factor)

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        """The product plus `summand`."""
        return self._product(x, "add", summand)

    def _product(self, x: Tensor, after: str, other: Tensor | None) -> Tensor:
        loops = loops_for(x) if len(x) <= FEW_ROWS else None
        if loops is not None:
            return self._by_loop(loops, x, getattr(loops, _AFTER[after]), other)
        if self._blocked is None:
            return self._plain(x, after, other)
        product: Tensor
        if other is None:
            product = torch.ops.mkldnn._linear_pointwise(x, self._blocked, self._bias, after, [], "")
        else:
            product = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._blocked, self._bias, after)
        return product

    def _by_loop(self, loops: Any, x: Tensor, after: int, other: Tensor | None) -> Tensor:
        x, beside = x.contiguous(), 0 if other is None else other.contiguous()
        whole = sum(layer.out_features for layer in self._layers)
        out, column = x.new_empty(len(x), whole), 0
        for layer in self._layers:
            weight, bias = layer.weight, 0 if layer.bias is None else layer.bias
            loops.product(len(x), x.shape[1], len(weight), whole, after, x, weight, bias, column, out, beside)
            column += len(weight)
        return out

    def _plain(self, x: Tensor, after: str, other: Tensor | None) -> Tensor:
        outputs = [F.linear(x, layer.weight, layer.bias) for layer in self._layers]
        product = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        if other is None:
            return F.silu(product) if after == "swish" else product
        return product.mul_(other) if after == "mul" else product.add_(other)
