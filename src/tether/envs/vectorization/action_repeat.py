"""Actions that are carried out several times, for simulators whose steps are short."""

from __future__ import annotations

from tether.envs.gymnasium_types import Env, Raw, Stepped, Wrapper


class Repeated(Wrapper):
    """Carries each action out several times, or until the episode ends; rewards add up.

    Args:
        env: an environment whose ``info`` tells ``success``.
        times: at least 1.
    """

    def __init__(self, env: Env, times: int) -> None:
        super().__init__(env)
        self._times = times

    def step(self, action: Raw) -> Stepped:
        """See `gymnasium.Env.step`; the task is solved where it is in any of the repetitions."""
        total, success = 0.0, 0.0
        for _ in range(self._times):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            success = max(success, float(info["success"]))
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, {**info, "success": success}
