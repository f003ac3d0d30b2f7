"""What MiniGrid's environments do not tell by themselves."""

from __future__ import annotations

from typing import Any

import gymnasium


class SuccessByReward(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Says in the infos that a task is solved, which MiniGrid and BabyAI say by a reward above 0 only."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated, info | {"is_success": float(reward) > 0}
