"""Action repeat, for simulators with short steps."""

from __future__ import annotations

from tether.control.envs.gymnasium_types import Env, Raw, Stepped, Wrapper


class Repeated(Wrapper):
    """Repeats each action several times or until the episode ends. Rewards are summed, and ``success`` is that of any
    repetition.

    Args:
        env: an environment whose ``info`` contains ``success``.
        times: number of repetitions, at least 1.
    """

    def __init__(self, env: Env, times: int) -> None:
        super().__init__(env)
        self._times = times

    def step(self, action: Raw) -> Stepped:
        total, success = 0.0, 0.0
        for _ in range(self._times):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            success = max(success, float(info["success"]))
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, {**info, "success": success}
