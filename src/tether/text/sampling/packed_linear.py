"""Linear layers for decoding: layers with the same input as one product, with the following operation fused into it.

A kernel may need weights in its own order (`tether.kernels.cpu.backend.Cpu.pack_linears`). A `Product` stores such a
copy, refreshed after each update. Where the backend needs no such order, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from tether.kernels import Epilogue, PackedLinears, kernels_for


class Product:
    """The concatenated outputs of some linear layers: [N, E] -> [N, sum of their widths].

    Args:
        layers: layers that read the same input.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        self._packed: PackedLinears | None = None
        self.refresh()

    def refresh(self) -> None:
        """Pack the layers' current weights again."""
        self._packed = None  # first, so that the new copy reuses the memory of the old one
        self._packed = kernels_for(self._layers[0].weight).pack_linears(self._layers)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        return self._product(x, Epilogue.NONE, None)

    def silu(self, x: Tensor) -> Tensor:
        """Return SiLU of the product."""
        return self._product(x, Epilogue.SILU, None)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return the product times `factor`."""
        return self._product(x, Epilogue.TIMES, factor)

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        """Return the product plus `summand`."""
        return self._product(x, Epilogue.PLUS, summand)

    def _product(self, x: Tensor, epilogue: Epilogue, other: Tensor | None) -> Tensor:
        return kernels_for(x).linears(x, self._layers, self._packed, epilogue, other)
