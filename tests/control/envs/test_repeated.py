"""Actions that are carried out several times."""

import pytest

gymnasium = pytest.importorskip("gymnasium")

from tether.control.envs.action_repeat import Repeated  # noqa: E402


class Steps(gymnasium.Env):
    """Step t pays t, is a success where t is 2, and ends the episode where t is 5."""

    observation_space = gymnasium.spaces.Discrete(6)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return 0, {}

    def step(self, action):
        self.t += 1
        return self.t, self.t, self.t == 5, False, {"success": float(self.t == 2), "t": self.t}


def test_rewards_add_up_and_an_end_ends_it():
    env = Repeated(Steps(), 3)
    env.reset()
    assert env.step(0) == (3, 1 + 2 + 3, False, False, {"success": 1.0, "t": 3})  # solved on the way
    assert env.step(0) == (5, 4 + 5, True, False, {"success": 0.0, "t": 5})
