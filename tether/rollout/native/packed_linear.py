"""Linear layers for decoding: those that read the same input as one product, and what follows them inside it.

On a CPU in bfloat16 a product wants its weight in an order of its own, and making that anew at every call can cost as
much as the product. A `Product` keeps it: a copy of the weights, refreshed after each update. Where the processor
multiplies bfloat16 by AMX or AVX-512 the product is then a loop of ours (`tether.kernels.dispatch.multiplying_for`), or
with AMX and very many rows oneDNN's, which may then as well put the weights in order. Elsewhere it is oneDNN's, but for
a row or two, for which a loop reads plain weights as fast as memory gives them. All of these also do the activation,
the gating or the residual sum before they round. On other devices and in other dtypes the layers' own weights are used
and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tether.kernels.dispatch import loops_for, multiplying_for

_ROWS = 64  # what oneDNN chooses the shape of its blocks for
FEW_ROWS = 2
"""Rows up to which a loop over plain weights is faster than oneDNN."""

_AFTER = {"none": "PLAIN", "swish": "SILU", "mul": "TIMES", "add": "PLUS"}
"""oneDNN's name for what follows a product -> that of `tether.kernels.cpu.elementwise`."""


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
        loops = multiplying_for(layers[0].weight)
        self._multiplying = loops if loops is not None and loops.can_multiply(layers[0].in_features) else None
        self._kept: Tensor | None = None
        self._bias: Tensor | None = None
        self._outputs = sum(layer.out_features for layer in layers)
        self.refresh()

    def refresh(self) -> None:
        """Take over the layers' current weights."""
        self._kept = None  # first, so that the new copy takes the memory of the old
        if self._multiplying is not None or has_blocked_products(self._layers[0].weight):
            weights = [layer.weight.detach() for layer in self._layers]
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            in_blocks = torch.ops.mkldnn._reorder_linear_weight
            self._kept = in_blocks(weight, _ROWS) if self._multiplying is None else self._multiplying.packed(weight)
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
        loops = loops_for(x)
        what = None if loops is None else getattr(loops, _AFTER[after])
        if self._multiplying is not None and len(x) <= self._multiplying.MOST_ROWS:
            product: Tensor = self._multiplying.multiplied(x, self._kept, self._outputs, self._bias, what, other)
            return product
        if what is not None and len(x) <= FEW_ROWS:
            return self._by_loop(loops, x, what, other)
        if self._kept is None or (self._multiplying is not None and len(self._layers) > 1):
            return self._plain(x, after, other)
        weight = self._kept if self._multiplying is None else self._layers[0].weight
        if other is None:
            product = torch.ops.mkldnn._linear_pointwise(x, weight, self._bias, after, [], "")
        else:
            product = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, self._bias, after)
        return product

    def _by_loop(self, loops: Any, x: Tensor, after: int, other: Tensor | None) -> Tensor:
        x, beside = x.contiguous(), 0 if other is None else other.contiguous()
        whole = self._outputs
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
