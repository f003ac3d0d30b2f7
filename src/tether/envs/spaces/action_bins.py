"""Actions as numbers of bins, as vision-language-action policies choose them (RT-2, OpenVLA).

The range of each column of an action is laid to [-1, 1], which 256 equal edges part into 255 bins. The number 255 means
the last bin, too, as in OpenVLA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tether.envs.protocol import DiscreteActions, Floats
from tether.observations import Array

NUMBERS = 256
EDGES = np.linspace(-1.0, 1.0, NUMBERS)
CENTERS = (EDGES[:-1] + EDGES[1:]) / 2
WIDTH = 1e-8
"""Added to a range, so that a column that never moves divides by no zero."""


@dataclass(frozen=True)
class ActionBins:
    """The ranges of D columns of an action."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def actions(self) -> DiscreteActions:
        """The actions as the policy gives them."""
        return DiscreteActions((NUMBERS,) * len(self.low))

    @property
    def taken(self) -> int:
        """D."""
        return len(self.low)

    @classmethod
    def of_data(cls, actions: NDArray[np.float32], quantiles: tuple[float, float]) -> ActionBins:
        """The range between two quantiles of recorded actions [N, D]; 0 and 1 for all of it."""
        low, high = np.quantile(actions.astype(np.float64), quantiles, axis=0)
        return cls(tuple(low.tolist()), tuple(high.tolist()))

    def decode(self, numbers: Array) -> Floats:
        """Actions [..., D] in the middle of bins [..., D]: ``(c + 1) / 2 * (high - low) + low``."""
        centers = CENTERS[np.minimum(numbers, NUMBERS - 2)]
        return ((centers + 1) / 2 * self._ranges + np.array(self.low)).astype(np.float32)

    def encode(self, actions: Floats) -> NDArray[np.int64]:
        """Bins [..., D] that actions [..., D] fall into; what is outside of the range falls into the outermost."""
        scaled = 2 * (actions - np.array(self.low)) / self._ranges - 1
        return np.clip(np.digitize(scaled, EDGES) - 1, 0, NUMBERS - 2)

    @property
    def _ranges(self) -> NDArray[np.float64]:
        return np.array(self.high) - np.array(self.low) + WIDTH


def check_bounds(env_id: str, low: Sequence[float], high: Sequence[float]) -> ActionBins:
    """The ranges of an action space.

    Raises:
        ValueError: one is not bounded.
    """
    for column, (start, stop) in enumerate(zip(low, high, strict=True)):
        if not np.isfinite([start, stop]).all():
            raise ValueError(
                f"{env_id}: column {column} of its actions reaches from {start} to {stop}, which no bins cover. Start "
                "from demonstrations (tether bc), whose range they take."
            )
    return ActionBins(tuple(low), tuple(high))
