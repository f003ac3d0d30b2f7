"""Processes of uneven speed: the policy acts for those that are ready, with the results of stepping together."""

import time
from typing import Any

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

from tether.control.collecting.collector import EnvCollector  # noqa: E402
from tether.control.envs.loop import SyncVectorEnv  # noqa: E402
from tether.control.envs.subprocesses import WorkerVectorEnv  # noqa: E402
from tether.control.policies.mlp_policy import make_policy  # noqa: E402
from tether.control.policies.spec import PolicySpec  # noqa: E402

ENVS, STEPS = 5, 12


class Uneven(gymnasium.Env):
    """Its steps take up to 4 ms, as its own generator says; episodes are cut or end, and some report a success."""

    observation_space = gymnasium.spaces.Box(-9, 9, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.normal(size=3).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        time.sleep(0.004 * self.np_random.random())
        end = self.np_random.random()
        obs, info = self.np_random.normal(size=3).astype(np.float32), {"success": True} if end > 0.8 else {}
        return obs, float(action) * end, end < 0.1, self.steps == 5, info


def collected(env: Any, policy: Any) -> tuple[list[Any], Any, int]:
    """Two rollouts, the state after them, and how often the policy acted."""
    acting, calls = policy.acting(), 0

    def act(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return acting(*arguments)

    collector = EnvCollector(env, STEPS, state_width=policy.state_width)
    collector.restart(3)
    batches = []
    for index in range(2):
        noise = policy.head.noise(collector.noise_shape, torch.Generator().manual_seed(index))
        batch = collector.collect(act, noise)
        parts = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        batches.append((parts, batch.obs.clone(), batch.final_obs.clone(), batch.episodes))
    return batches, collector.state_dict(), calls


@pytest.mark.parametrize("lstm_dim", [None, 4])
def test_results_do_not_depend_on_who_is_ready_first(lstm_dim: int | None) -> None:
    policy = make_policy(PolicySpec(3, (3,), 1, hidden_dim=8, num_layers=1, lstm_dim=lstm_dim), seed=0)

    def make(count: int) -> SyncVectorEnv:
        return SyncVectorEnv("uneven", Uneven, count)

    workers = WorkerVectorEnv("uneven", make, ENVS, 3)
    try:
        got, state, calls = collected(workers, policy)
    finally:
        workers.close()
    together = make(ENVS)
    wanted, wanted_state, wanted_calls = collected(together, policy)
    assert wanted_calls == 2 * STEPS < calls  # it acted for some of them, again and again
    for (parts, *tensors, episodes), (other, *other_tensors, other_episodes) in zip(got, wanted, strict=True):
        assert episodes == other_episodes
        assert parts.keys() == other.keys() != set()
        assert all(parts[name].equal(other[name]) for name in parts), parts.keys()
        for one, another in zip(tensors, other_tensors, strict=True):
            assert all(one[name].equal(another[name]) for name in dict(one))
    assert all(state["now"][name].equal(wanted_state["now"][name]) for name in state["now"])
    assert state["memory"].equal(wanted_state["memory"])
    assert state["fresh"].equal(wanted_state["fresh"])
