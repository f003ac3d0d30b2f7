"""How much faster are slow and uneven simulators if the policy acts for those that are ready, and waits for no other?

    python -m benchmarks.uneven_simulators            # 8 processes, steps of 1 to 8 ms, now and then one of 100 ms

Both ways collect the same rollouts, whose rewards must be equal.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import gymnasium
import numpy as np
import torch

from tether.control.collecting.collector import EnvCollector
from tether.control.envs.layers import TimedEnv
from tether.control.envs.loop import SyncVectorEnv
from tether.control.envs.subprocesses import WorkerVectorEnv
from tether.control.policies.mlp_policy import make_policy
from tether.control.policies.spec import PolicySpec

HICCUP, USUAL, SLOWEST = 0.02, (0.001, 0.008), 0.1
"""Share of the steps that take longest; seconds of the others, and of these."""


class Slow(gymnasium.Env[Any, Any]):
    """Sleeps, and shows the last action."""

    observation_space = gymnasium.spaces.Box(-9, 9, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.random = random.Random(seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        time.sleep(SLOWEST if self.random.random() < HICCUP else self.random.uniform(*USUAL))
        return np.concatenate([action, action]).astype(np.float32), float(action.sum()), False, False, {}


class Together(TimedEnv):
    """Hides that processes can be stepped one by one."""

    groups = ()


def make(count: int) -> SyncVectorEnv:
    return SyncVectorEnv("slow", Slow, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    policy = make_policy(PolicySpec(4, None, 2), seed=0)
    for number in range(given.rounds):
        seconds, rewards = [], []
        for wrap in (lambda env: Together(env, 300.0, "slow"), lambda env: env):
            env = WorkerVectorEnv("slow", make, given.processes, given.processes)
            collector = EnvCollector(wrap(env), given.steps)
            noise = policy.head.noise(collector.noise_shape, torch.Generator().manual_seed(number))
            begun = time.perf_counter()
            batch = collector.collect(policy.acting(), noise, [number])
            seconds.append(time.perf_counter() - begun)
            rewards.append(batch.token_level_scores.clone())
            env.close()
        assert rewards[0].equal(rewards[1])
        rates = [given.steps * given.processes / second for second in seconds]
        print(f"together {rates[0]:.0f} steps a second, first ready {rates[1]:.0f}: {rates[1] / rates[0]:.2f} times")


if __name__ == "__main__":
    main()
