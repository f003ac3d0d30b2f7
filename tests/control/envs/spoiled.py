"""Wrappers with something wrong, each of which a preflight names."""

import gymnasium


class Large(gymnasium.ObservationWrapper):
    """Shows numbers a thousand times as large."""

    def __init__(self, env):
        super().__init__(env)
        low, high = env.observation_space.low, env.observation_space.high
        self.observation_space = gymnasium.spaces.Box(low * 1000, high * 1000)

    def observation(self, observation):
        return observation * 1000


class NeverRewards(gymnasium.Wrapper):
    """No reward, and no end."""

    def step(self, action):
        obs, _, ended, _, info = self.env.step(action)
        if ended:
            obs, info = self.env.reset()
        return obs, 0.0, False, False, info


class EndsAtOnce(gymnasium.Wrapper):
    """Every step is the last."""

    def step(self, action):
        obs, reward, _, truncated, info = self.env.step(action)
        return obs, reward, True, truncated, info
