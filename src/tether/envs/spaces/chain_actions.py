"""Actions as flow-matching policies record them: of each, the first columns are the action, in the policy's scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tether.envs.protocol import ContinuousActions, Floats
from tether.observations import Array


@dataclass(frozen=True)
class ChainActions:
    """How the recorded columns of an action become one of the environment's."""

    offset: tuple[float, ...]
    """Of each of the D columns that the environment takes."""
    scale: tuple[float, ...]
    width: int
    """Columns that are recorded."""

    @property
    def actions(self) -> ContinuousActions:
        """The actions as the policy gives them."""
        return ContinuousActions(self.width)

    @property
    def taken(self) -> int:
        """D."""
        return len(self.offset)

    def decode(self, columns: Array) -> Floats:
        """Actions [..., D] of recorded columns [..., width]."""
        taken = columns[..., : self.taken]
        return (taken * np.array(self.scale) + np.array(self.offset)).astype(np.float32)
