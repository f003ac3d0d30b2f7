"""Nothing comes after an episode that ended by itself, whatever the critic says of the state that follows."""

import pytest
import torch

pytest.importorskip("gymnasium")

from tests.control.envs import toys
from tests.runs.control_samples import make_samples
from tether.control.collecting.collector import EnvCollector
from tether.control.envs.make import EnvOptions, make_vector_env
from tether.control.policies.mlp_policy import ControlPolicy, PolicySpec


def test_the_return_of_the_last_step_is_its_reward() -> None:
    """Rewards 1, 2 and 3, and a critic that says 10 of every state, also of the first one of the next episode."""
    policy = ControlPolicy(PolicySpec(1, (2,), 1, hidden_dim=4), 0)
    with torch.no_grad():
        policy.critic.linear[-1][0].zero_()
        policy.critic.linear[-1][1].fill_(10.0)
    toys.register()
    collector = EnvCollector(make_vector_env(EnvOptions("tether/Countdown-v0", 1, init_params={"ends": 3})), steps=6)
    collector.restart(0)
    rollout = collector.collect(policy.acting(), policy.head.noise((1, 6, 1), torch.Generator().manual_seed(0)))
    assert rollout.terminated.sum() == 2
    samples, _ = make_samples(rollout, policy, gamma=0.5, lam=1.0, normalize_advantages=False)
    second = 2 + 0.5 * 3
    assert samples.returns.flatten().tolist() == [1 + 0.5 * second, second, 3.0] * 2
