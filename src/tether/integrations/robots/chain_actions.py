"""Actions as flow-matching policies record them: the first columns are the action in the policy's scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tether.control.envs.protocol import ContinuousActions, Floats
from tether.observations import Array


@dataclass(frozen=True)
class ChainActions:
    """Converts the recorded columns of an action to an action of the environment."""

    offset: tuple[float, ...]
    """Offset of each of the D columns of the environment's actions."""
    scale: tuple[float, ...]
    """Scale of each of the D columns."""
    width: int
    """Number of recorded columns."""

    @property
    def actions(self) -> ContinuousActions:
        """The action space of the policy."""
        return ContinuousActions(self.width)

    @property
    def action_dim(self) -> int:
        """D: columns of the environment's actions."""
        return len(self.offset)

    def decode(self, columns: Array) -> Floats:
        """Return the actions [..., D] of recorded columns [..., width]."""
        scaled = columns[..., : self.action_dim]
        return (scaled * np.array(self.scale) + np.array(self.offset)).astype(np.float32)
