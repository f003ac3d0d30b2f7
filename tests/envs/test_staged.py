"""Stages: the same experience as without, and they overlap."""

import threading

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

from tether.envs.make import EnvOptions, Pacing, make_stages, make_vector_env  # noqa: E402
from tether.envs.protocol import DiscreteActions, EnvStep  # noqa: E402
from tether.envs.vectorization.stages import StagedEnv  # noqa: E402
from tether.rollout.env.collector import EnvCollector  # noqa: E402

STEPS, ENVS = 30, 4
COLUMNS = ("obs", "actions", "rewards", "terminated", "truncated", "valid", "starts", "state", "final_obs")


def act(obs, noise, state):
    """Depends on what is seen, and on nothing else; remembers how much that was."""
    return (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)[:, None].repeat(2, axis=1)[:, : noise.shape[1]], state + 1


def collect(env, chunk):
    collector = EnvCollector(env, STEPS, chunk=chunk, state_width=1)
    collector.restart(seed=3)
    noise = torch.zeros(1, STEPS // chunk, ENVS, chunk)
    rollouts = [vars(collector.collect(act, noise)) for _ in range(2)]
    env.close()
    return [{key: value.clone() for key, value in rollouts[-1].items() if key in COLUMNS}, rollouts[-1]["final_at"]]


@pytest.mark.parametrize("pacing", [Pacing(), Pacing(chunk=2), Pacing(group_size=4), Pacing(fixed_seed=1)])
def test_stages_change_nothing(pacing):
    options = EnvOptions("CartPole-v1", ENVS, max_episode_steps=12, pacing=pacing)
    whole, finals = collect(make_vector_env(options), pacing.chunk)
    staged, staged_finals = collect(make_stages(options, 2), pacing.chunk)
    for key, column in whole.items():
        torch.testing.assert_close(staged[key], column, rtol=0, atol=0, msg=key)
    assert [at.tolist() for at in staged_finals] == [at.tolist() for at in finals]
    assert whole["truncated"].any()
    assert whole["state"].max() > 0


def test_envpool_is_staged_alike():
    pytest.importorskip("envpool")
    options = EnvOptions("CartPole-v1", ENVS, env_type="envpool", max_episode_steps=12)
    whole, _ = collect(make_vector_env(options), 1)
    staged, _ = collect(make_stages(options, 2), 1)
    for key in ("obs", "rewards", "truncated"):
        torch.testing.assert_close(staged[key], whole[key], rtol=0, atol=0, msg=key)


class Waits:
    """A step ends when the policy has decided for the other stage, which it never does without overlap."""

    id, num_envs, obs_dim, layout, actions = "waits", 1, 1, (), DiscreteActions((2,))

    def __init__(self, number, decided):
        self._number, self._decided = number, decided

    def reset(self, seed):
        return np.array([[self._number]], dtype=np.float32)

    def step(self, actions):
        assert self._decided[1].wait(timeout=20), "stage 0 is waited for before stage 1 is decided on"
        no = np.zeros(1, dtype=np.bool_)
        return EnvStep(self.reset(0), np.ones(1, dtype=np.float32), no, no)

    def close(self):
        pass


def test_the_policy_decides_while_environments_step():
    decided = [threading.Event(), threading.Event()]

    def act(obs, noise, state):
        decided[int(obs[0, 0])].set()
        return np.zeros((1, 1), dtype=np.int64), state

    env = StagedEnv([Waits(number, decided) for number in range(2)])
    collector = EnvCollector(env, 3)
    collector.restart(0)
    assert collector.collect(act, torch.zeros(1, 3, 2, 1)).rewards.sum() == 6
    env.close()


def test_what_a_stage_raises_says_where():
    class Breaks(Waits):
        def step(self, actions):
            raise RuntimeError("broken")

    env = StagedEnv([Breaks(number, []) for number in range(2)])
    collector = EnvCollector(env, 3)
    collector.restart(0)
    with pytest.raises(RuntimeError, match="broken") as error:
        collector.collect(lambda obs, noise, state: (np.zeros((1, 1), dtype=np.int64), state), torch.zeros(1, 3, 2, 1))
    assert "raised by waits at step 1" in error.value.__notes__[0]
    env.close()
