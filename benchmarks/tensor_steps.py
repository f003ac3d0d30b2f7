"""What does tether add to a step of robots as tensors, beside the simulator and the policy?

    python -m benchmarks.tensor_steps                 # IsaacLab's shape: 4,096 robots, 48 numbers, 12 actions, 24 steps
    python -m benchmarks.tensor_steps --robots 1024

The simulator costs nothing, and neither does the policy: rollouts are collected with ready answers of both. Printed are
the milliseconds of processor time of a step: of all, of the adapter, and of the collector beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from tether.control.collecting.collector import EnvCollector
from tether.control.envs.batched_simulation import self_resetting


class Nothing:
    """Robots whose values are ready; now and then an episode of some is cut."""

    device = "cpu"

    def __init__(self, robots: int, numbers: int, actions: int) -> None:
        self.num_envs, self.unwrapped = robots, self
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (numbers,), np.float32)
        self.single_action_space = spaces.Box(-1, 1, (actions,), np.float32)
        self.seen, self.reward = torch.randn(robots, numbers), torch.randn(robots)
        self.ended, self.cut = torch.zeros(robots, dtype=torch.bool), torch.arange(robots) % 1000 == 0

    def reset(self, **options: Any) -> Any:
        return self.seen, {}

    def step(self, actions: Any) -> Any:
        return self.seen, self.reward, self.ended, self.cut, {}

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"robots": 4096, "numbers": 48, "actions": 12, "steps": 24, "rollouts": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    env = self_resetting("robots", Nothing(given.robots, given.numbers, given.actions), given.robots)
    collector = EnvCollector(env, given.steps)
    collector.restart(1)
    chosen = np.random.default_rng(0).normal(size=(given.robots, given.actions)).astype(np.float32)
    noise = torch.zeros(1, given.steps, given.robots, 1)
    both, adapter = [], []
    for _ in range(given.rollouts):
        begun = time.process_time()
        collector.collect(lambda obs, noise, state: (chosen, state), noise)
        collected = time.process_time()
        for _ in range(given.steps):
            env.step(chosen)
        both.append(1000 * (collected - begun) / given.steps)
        adapter.append(1000 * (time.process_time() - collected) / given.steps)
    whole, alone = statistics.median(both), statistics.median(adapter)
    print(f"{whole:.2f} ms of processor time a step: adapter {alone:.2f}, collector {whole - alone:.2f}")


if __name__ == "__main__":
    main()
