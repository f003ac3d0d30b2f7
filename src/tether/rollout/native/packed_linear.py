"""Linear layers for decoding: those that read the same input as one product, and what follows them inside it.

A kernel may want weights in an order of its own (`tether.kernels.cpu.backend.Cpu.pack_linears`). A `Product` keeps them
so: a copy, refreshed after each update. Where the backend has no such order nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from tether.kernels import Epilogue, PackedLinears, kernels_for


class Product:
    """The outputs of some linear layers, side by side: [N, E] -> [N, sum of their widths].

    Args:
        layers: they read the same input.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        self._packed: PackedLinears | None = None
        self.refresh()

    def refresh(self) -> None:
        """Take over the layers' current weights."""
        self._packed = None  # first, so that the new copy takes the memory of the old
        self._packed = kernels_for(self._layers[0].weight).pack_linears(self._layers)

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return self._product(x, Epilogue.NONE, None)

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the product."""
        return self._product(x, Epilogue.SILU, None)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The product times `factor`."""
        return self._product(x, Epilogue.TIMES, factor)

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        """The product plus `summand`."""
        return self._product(x, Epilogue.PLUS, summand)

    def _product(self, x: Tensor, epilogue: Epilogue, other: Tensor | None) -> Tensor:
        return kernels_for(x).linears(x, self._layers, self._packed, epilogue, other)
