"""Running statistics of observations, which are part of a policy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from tether.control.policies.mlp import FloatArray, as_array

EPSILON = 1e-8


class RunningNormalizer(nn.Module):
    """Normalises observations to mean 0 and variance 1 with the statistics of all earlier ones.

    Statistics change only in `update`, between rollouts, so that a policy does not drift while it samples. Before the
    first update, observations are only clipped.

    Args:
        size: number of entries of an observation.
        clip: bound of the absolute value of the result.
        unchanged: [size] entries that are neither normalised nor clipped; None: none.
    """

    count: Tensor
    mean: Tensor
    var: Tensor
    shift: Tensor
    scale: Tensor
    clip: Tensor

    def __init__(self, size: int, clip: float, unchanged: Tensor | None = None) -> None:
        super().__init__()
        self._unchanged = torch.zeros(size, dtype=torch.bool) if unchanged is None else unchanged
        self.fixed = False
        """Whether `update` is disabled, because a pretrained policy would behave differently if its statistics
        moved."""
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        # Read by `forward`, in float32.
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        self.register_buffer("clip", torch.full((size,), clip).masked_fill(self._unchanged, math.inf), persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        """Return normalised observations [..., size]."""
        return ((obs - self.shift) * self.scale).clamp_(-self.clip, self.clip)

    def in_numpy(self) -> Callable[[FloatArray], FloatArray]:
        """Return `forward` in NumPy with the current statistics."""
        shift, scale, clip = as_array(self.shift), as_array(self.scale), as_array(self.clip)
        return lambda obs: np.minimum(np.maximum((obs - shift) * scale, -clip), clip)

    def update(self, obs: Tensor) -> None:
        """Add observations [B, size] to the statistics (Chan et al. 1979)."""
        if self.fixed or not obs.shape[-1]:
            return
        new = obs.double()
        total = self.count + len(new)
        shift = new.mean(dim=0) - self.mean
        squares = self.var * self.count + new.var(dim=0, unbiased=False) * len(new)
        self.var.copy_((squares + shift.square() * self.count * len(new) / total) / total)
        self.mean.add_(shift * len(new) / total)
        self.count.copy_(total)
        self.shift.copy_(self.mean.masked_fill(self._unchanged, 0.0))
        self.scale.copy_((self.var + EPSILON).rsqrt().masked_fill(self._unchanged, 1.0))
