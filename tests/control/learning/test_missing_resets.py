"""Environments that do not begin a new episode where one ends are named, once."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv

from tether.control.collecting.collector import EnvCollector
from tether.control.envs.gymnasium_vector import GymnasiumVectorEnv
from tether.control.learning.rollouts import EnvRollouts
from tether.control.policies.mlp_policy import make_policy
from tether.control.policies.spec import PolicySpec
from tether.metrics.timing import Timer

STEPS = 16


class Ends(VectorEnv):
    """Two environments with episodes of five steps; the second one says at every step from the fifth that it ends."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, resets: bool) -> None:
        self.num_envs, self.resets = 2, resets
        self.single_observation_space = gymnasium.spaces.Box(0, 99, (1,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = np.zeros((2, 1), np.float32)
        return self.t.copy(), {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        ended = self.t[:, 0] >= 5
        last = self.t.copy()
        self.t[ended & [True, self.resets]] = 0
        return self.t.copy(), np.ones(2), ended, np.zeros(2, np.bool_), {"final_obs": last}


@pytest.mark.parametrize("resets", [True, False])
def test_an_environment_that_does_not_reset_is_named_once(resets: bool) -> None:
    warnings = list[str]()
    env: Any = GymnasiumVectorEnv("mine", Ends(resets))
    policy = make_policy(PolicySpec(1, (2,), 1, layout=env.layout, hidden_dim=8, num_layers=1), seed=0)
    rollouts = EnvRollouts(
        policy=policy, collector=EnvCollector(env, STEPS), evaluation=None, seed=1, env_seed=1, warn=warnings.append
    )
    rollouts.collector.restart(0)
    for step in range(4):
        rollouts.collect([], step, Timer(), lambda *_: None)
    assert len(warnings) == (0 if resets else 1)
    assert resets or warnings[0].startswith("mine: environment 1 ended an episode in each of the last 16 steps, and ")
