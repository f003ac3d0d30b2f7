"""Actions as bin indices, for vision-language-action policies (RT-2, OpenVLA).

The range of each column is scaled to [-1, 1], which 256 equidistant edges divide into 255 bins. As in OpenVLA, index
255 also denotes the last bin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tether.control.envs.protocol import DiscreteActions, Floats
from tether.observations import Array

NUM_INDICES = 256
EDGES = np.linspace(-1.0, 1.0, NUM_INDICES)
CENTERS = (EDGES[:-1] + EDGES[1:]) / 2
EPSILON = 1e-8
"""Added to each range, so that constant columns do not cause a division by zero."""


@dataclass(frozen=True)
class ActionBins:
    """The ranges of the D columns of an action."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def actions(self) -> DiscreteActions:
        """The action space of the policy."""
        return DiscreteActions((NUM_INDICES,) * len(self.low))

    @property
    def action_dim(self) -> int:
        """D: columns of the environment's actions."""
        return len(self.low)

    @classmethod
    def of_data(cls, actions: NDArray[np.float32], quantiles: tuple[float, float]) -> ActionBins:
        """Return the ranges between two quantiles of recorded actions [N, D]; (0, 1) is the full range."""
        low, high = np.quantile(actions.astype(np.float64), quantiles, axis=0)
        return cls(tuple(low.tolist()), tuple(high.tolist()))

    def decode(self, indices: Array) -> Floats:
        """Return the actions [..., D] at the centers c of bins [..., D]: ``(c + 1) / 2 * (high - low) + low``."""
        centers = CENTERS[np.minimum(indices, NUM_INDICES - 2)]
        return ((centers + 1) / 2 * self._ranges + np.array(self.low)).astype(np.float32)

    def encode(self, actions: Floats) -> NDArray[np.int64]:
        """Return the bins [..., D] of actions [..., D]; values outside of the range get the outermost bin."""
        scaled = 2 * (actions - np.array(self.low)) / self._ranges - 1
        return np.clip(np.digitize(scaled, EDGES) - 1, 0, NUM_INDICES - 2)

    @property
    def _ranges(self) -> NDArray[np.float64]:
        return np.array(self.high) - np.array(self.low) + EPSILON


def check_bounds(env_id: str, low: Sequence[float], high: Sequence[float]) -> ActionBins:
    """Return the bins for a bounded action space.

    Raises:
        ValueError: a column is not bounded.
    """
    for column, (start, stop) in enumerate(zip(low, high, strict=True)):
        if not np.isfinite([start, stop]).all():
            raise ValueError(
                f"{env_id}: column {column} of its actions reaches from {start} to {stop}, which no bins cover. Start "
                "from demonstrations (tether bc), whose range they take."
            )
    return ActionBins(tuple(low), tuple(high))
