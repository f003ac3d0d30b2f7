"""What stages are worth: rollouts of a simulator that takes its time, with and without `env.train.pipeline_stage_num`.

    python -m benchmarks.stages [--envs 64] [--latency-ms 15] [--hidden-dim 2048] [--stages 1 2 4]

The simulator sleeps through a step of all its environments, as one does that computes on another device, so that the
core is the policy's. Runs of all kinds alternate, and medians are compared. Stages gain what they overlap, and lose
where the policy is no faster for fewer rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tether.envs.protocol import ContinuousActions, EnvStep, Floats
from tether.envs.vectorization.stages import StagedEnv
from tether.models.control.actors import Actor
from tether.models.control.mlp_policy import ControlPolicy, PolicySpec
from tether.rollout.env.collector import EnvCollector

OBS, ACTIONS = 64, 8


class Slow:
    id, obs_dim, actions = "slow", OBS, ContinuousActions(ACTIONS)

    def __init__(self, num_envs: int, seconds: float) -> None:
        self.num_envs, self._seconds = num_envs, seconds

    def reset(self, seed: int) -> Floats:
        return np.zeros((self.num_envs, OBS), dtype=np.float32)

    def step(self, actions: NDArray[Any]) -> EnvStep:
        time.sleep(self._seconds)
        no = np.zeros(self.num_envs, dtype=np.bool_)
        return EnvStep(self.reset(0), np.zeros(self.num_envs, dtype=np.float32), no, no)

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--latency-ms", type=float, default=15)
    parser.add_argument("--hidden-dim", type=int, default=2048)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = PolicySpec(OBS, None, ACTIONS, hidden_dim=args.hidden_dim)
    act, noise = Actor(ControlPolicy(spec, seed=0)), torch.zeros(1, args.steps, args.envs, ACTIONS)
    collectors: dict[int, EnvCollector] = {}
    for count in args.stages:
        size = args.envs // count
        collectors[count] = EnvCollector(
            StagedEnv([Slow(size, args.latency_ms / 1000) for _ in range(count)]), args.steps
        )
        collectors[count].restart(seed=0)
    taken: dict[int, list[float]] = {count: [] for count in args.stages}
    for _ in range(args.rounds):
        for count, collector in collectors.items():
            start = time.perf_counter()
            collector.collect(act, noise)
            taken[count].append(time.perf_counter() - start)
    for count, seconds in taken.items():
        rows = np.zeros((args.envs // count, OBS), dtype=np.float32)
        start = time.perf_counter()
        for _ in range(args.steps):
            act(rows, None)
        deciding = 1000 * (time.perf_counter() - start) / args.steps
        speed = args.envs * args.steps / statistics.median(seconds)
        ratio = statistics.median(taken[args.stages[0]]) / statistics.median(seconds)
        print(
            f"{count} stages: {speed:8,.0f} environment steps a second, {ratio:.2f} times {args.stages[0]}; "
            f"deciding takes {deciding:.1f} ms a stage"
        )
    for collector in collectors.values():
        collector.env.close()


if __name__ == "__main__":
    main()
