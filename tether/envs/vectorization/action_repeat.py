"""Actions that are carried out several times, for simulators whose steps are short."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium


class Repeated(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Carries each action out several times, or until the episode ends; rewards add up.

    Args:
        env: an environment whose ``info`` tells ``success``.
        times: at least 1.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], times: int) -> None:
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`; the task is solved where it is in any of the repetitions."""
        total, success = 0.0, 0.0
        for _ in range(self._times):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            success = max(success, float(info["success"]))
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, {**info, "success": success}
