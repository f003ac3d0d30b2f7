"""A policy remembers its episode so far and nothing else, in every autoreset mode."""

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

from tests.control.envs import toys  # noqa: E402
from tests.control.envs.test_vector import ENVS, MAKERS  # noqa: E402
from tests.control.envs.test_workers import kill  # noqa: E402
from tether.control.collecting.collector import EnvCollector  # noqa: E402
from tether.control.collecting.evaluation import evaluate  # noqa: E402
from tether.control.envs.make import EnvOptions, ResetPolicy, make_vector_env  # noqa: E402


class Counts:
    """Acts with a memory of the number of decisions that it has seen."""

    def __init__(self):
        self.known = []

    def __call__(self, obs, noise, state):
        self.known.append(state[:, 0].copy())
        return np.zeros((len(state), 1), dtype=np.int64), state + 1


def rollouts(env, steps, count=3):
    """(rollout, what was known at each of its decisions) of some rollouts in a row."""
    collector = EnvCollector(env, steps, state_width=1)
    collector.restart(seed=0)
    for _ in range(count):
        act = Counts()
        yield collector.collect(act, torch.zeros(1, steps, env.num_envs, 1)), np.array(act.known).T
    collector.restart(seed=0)
    act = Counts()
    assert not collector.collect(act, torch.zeros(1, steps, env.num_envs, 1)).state.any()
    assert not act.known[0].any()


@pytest.mark.parametrize("ends", [3, 10**6])
@pytest.mark.parametrize("name", MAKERS)
def test_a_memory_is_as_old_as_its_episode(name, ends):
    # An observation of Countdown is the number of steps since its episode began, and so is what is known then.
    for rollout, known in rollouts(MAKERS[name](ends), steps=7):
        age, valid, starts = (
            of.numpy() for of in (rollout.obs["state"][:, :-1, 0], rollout.valid, rollout.starts[:, :-1])
        )
        assert np.array_equal(known[valid], age[valid])
        assert np.array_equal(starts[valid], age[valid] == 0)
        going_on = ~starts[:, 0]
        assert np.array_equal(rollout.state[going_on, 0].numpy(), age[going_on, 0])
        assert known.shape == (ENVS, 7)


def test_a_memory_of_chunks():
    toys.register()
    env = make_vector_env(EnvOptions("tether/Countdown-v0", 2, reset_policy=ResetPolicy(chunk=2)))
    collector = EnvCollector(env, 12, chunk=2, state_width=1)
    collector.restart(0)
    known = []

    def act(obs, noise, state):
        known.append(state[0, 0])
        return np.zeros((2, 2), dtype=np.int64), state + 1

    rollout = collector.collect(act, torch.zeros(1, 6, 2, 1))
    assert known == [0, 1, 2, 0, 1, 2]  # episodes of five steps are three chunks
    assert rollout.starts[0].tolist() == [True, False, False] * 2 + [True]


def test_episodes_that_wait_for_the_next_rollout_begin_there():
    toys.register()
    env = make_vector_env(EnvOptions("tether/Countdown-v0", 2, reset_policy=ResetPolicy(auto_reset=False)))
    collector = EnvCollector(env, 8, epochs=2, state_width=1)
    act = Counts()
    rollout = collector.collect(act, torch.zeros(2, 8, 2, 1), seeds=[0, 1])
    first, second = np.array(act.known)[:8], np.array(act.known)[8:]
    assert first[:5, 0].tolist() == second[:5, 0].tolist() == [0, 1, 2, 3, 4]
    assert rollout.starts[:, :-1][rollout.valid].sum() == 4
    assert not rollout.state.any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_lost_episode_is_forgotten():
    toys.register()
    env = make_vector_env(EnvOptions("tether/Countdown-v0", 2, vectorization="subprocess", num_workers=2))
    collector = EnvCollector(env, 2, state_width=1)
    collector.restart(0)
    collector.collect(Counts(), torch.zeros(1, 2, 2, 1))
    kill(env, 1)
    act = Counts()
    rollout = collector.collect(act, torch.zeros(1, 2, 2, 1))
    assert act.known[0].tolist() == [2, 2]
    assert 0 in {memory for _, memory in act.known[1:]}  # how often it acts depends on who is ready first
    assert rollout.starts[:, 1].tolist() == [False, True]
    env.close()


@pytest.mark.parametrize("name", MAKERS)
def test_a_test_begins_each_episode_without_memory(name):
    seen = []

    def act(obs, noise, state):
        seen.append((obs["state"][:, 0].copy(), state[:, 0].copy()))
        return np.zeros((len(state), 1), dtype=np.int64), state + 1

    episodes = evaluate(MAKERS[name](), act, 2 * ENVS, seed=0, state_width=1)
    assert len(episodes) == 2 * ENVS
    for age, known in seen:
        # In the step that only resets, the last observation of the old episode is still shown.
        assert np.array_equal(age, known) or (name == "NextStep" and (age == 5).all() and not known.any())
