"""A task that memory alone decides: a cue at the first step, and a fork at the last where it says the way.

At the fork both ways look the same. So 1.0 is the most that a policy with a memory can get, and 0.5 without.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class TMaze(gymnasium.Env[Any, Any]):
    """A corridor that is walked by itself; the action of the last step counts (Bakker 2001, without the walking).

    Args:
        length: steps of an episode.
    """

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 10) -> None:
        self._length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Show the cue, -1 or 1."""
        super().reset(seed=seed)
        self._cue, self._at = int(self.np_random.integers(2)), 0
        return np.array([2 * self._cue - 1, 0], dtype=np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Walk on; at the end, 1 for the way that the cue said."""
        self._at += 1
        ended = self._at == self._length
        shown = np.array([0, self._at == self._length - 1], dtype=np.float32)
        return shown, float(ended and int(action) == self._cue), ended, False, {}


gymnasium.register("TMaze-v0", entry_point=TMaze)
