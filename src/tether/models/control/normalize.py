"""Running statistics of observations, which are part of a policy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from tether.models.control.mlp import FloatArray, as_array

EPSILON = 1e-8


class RunningNormalizer(nn.Module):
    """Brings observations to mean 0 and variance 1 by the statistics of all that came before.

    They change only in `update`, between rollouts, so that a policy does not drift while it samples. Before the first
    update nothing is changed but cut.

    Args:
        size: entries of an observation.
        clip: bound of the result, both ways.
        kept: [size] entries that stay as they are; None: none does.
    """

    count: Tensor
    mean: Tensor
    var: Tensor
    shift: Tensor
    scale: Tensor
    clip: Tensor

    def __init__(self, size: int, clip: float, kept: Tensor | None = None) -> None:
        super().__init__()
        self._kept = torch.zeros(size, dtype=torch.bool) if kept is None else kept
        self.fixed = False
        """`update` changes nothing: a policy that can do something would do another thing where statistics move."""
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        # What `forward` reads, in float32.
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        self.register_buffer("clip", torch.full((size,), clip).masked_fill(self._kept, math.inf), persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return ((obs - self.shift) * self.scale).clamp_(-self.clip, self.clip)

    def in_numpy(self) -> Callable[[FloatArray], FloatArray]:
        """`forward` in NumPy, with the statistics of this moment."""
        shift, scale, clip = as_array(self.shift), as_array(self.scale), as_array(self.clip)
        return lambda obs: np.minimum(np.maximum((obs - shift) * scale, -clip), clip)

    def update(self, obs: Tensor) -> None:
        """Take observations [B, size] in (Chan et al. 1979)."""
        if self.fixed or not obs.shape[-1]:
            return
        new = obs.double()
        total = self.count + len(new)
        shift = new.mean(dim=0) - self.mean
        squares = self.var * self.count + new.var(dim=0, unbiased=False) * len(new)
        self.var.copy_((squares + shift.square() * self.count * len(new) / total) / total)
        self.mean.add_(shift * len(new) / total)
        self.count.copy_(total)
        self.shift.copy_(self.mean.masked_fill(self._kept, 0.0))
        self.scale.copy_((self.var + EPSILON).rsqrt().masked_fill(self._kept, 1.0))
