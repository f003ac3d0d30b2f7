"""Operations fused to the end of a linear layer, and weights packed in the order that a kernel needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 2
"""Number of rows up to which a kernel may compute a linear layer without packed weights."""


class Epilogue(Enum):
    """Applied to the outputs of a linear layer before they are rounded; the last two need a second tensor."""

    NONE = "none"
    SILU = "silu"
    TIMES = "times"
    PLUS = "plus"


@dataclass(frozen=True)
class PackedLinears:
    """Layers that read the same input, as one: weights in the backend's own order, and biases."""

    weight: Tensor
    bias: Tensor | None


def apply_epilogue(product: Tensor, epilogue: Epilogue, other: Tensor | None) -> Tensor:
    """Apply an epilogue to [N, O] with `other` [N, O]; in place, except SiLU."""
    if other is None:
        return F.silu(product) if epilogue is Epilogue.SILU else product
    return product.mul_(other) if epilogue is Epilogue.TIMES else product.add_(other)
