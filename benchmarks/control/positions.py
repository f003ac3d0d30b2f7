"""CartPole without its velocities, which only a policy with a memory can tell."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class PositionsOnly(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows the first and third number of CartPole's observation: positions of cart and pole."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        shown = env.observation_space
        assert isinstance(shown, spaces.Box)
        self.observation_space = spaces.Box(shown.low[[0, 2]], shown.high[[0, 2]], dtype=np.float32)

    def observation(self, observation: Any) -> Any:
        """Leave the velocities out."""
        return observation[[0, 2]]
