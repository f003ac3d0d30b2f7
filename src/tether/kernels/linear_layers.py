"""Operations fused to the end of a linear layer, and weights packed in a kernel's own order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 2
"""Rows up to which a kernel may take another way."""


class Epilogue(Enum):
    """Applied to the outputs of a linear layer before they are rounded; the last two take another tensor."""

    NONE = "none"
    SILU = "silu"
    TIMES = "times"
    PLUS = "plus"


@dataclass(frozen=True)
class PackedLinears:
    """Layers that read the same input, as one: weights in an order of the maker's own, and biases."""

    weight: Tensor
    bias: Tensor | None


def apply_epilogue(product: Tensor, epilogue: Epilogue, other: Tensor | None) -> Tensor:
    """In place, except SiLU: [N, O], with `other` [N, O]."""
    if other is None:
        return F.silu(product) if epilogue is Epilogue.SILU else product
    return product.mul_(other) if epilogue is Epilogue.TIMES else product.add_(other)
