"""Worker processes: what becomes of the episodes of one that dies."""

import os
import signal

import numpy as np
import pytest

from tests.envs import toys
from tether.envs.make import EnvOptions, Pacing, make_vector_env
from tether.rollout.episodes import EpisodeTracker

NOTHING = np.zeros((3, 1), dtype=np.int64)


@pytest.fixture
def countdown():
    toys.register()
    made = []

    def make(**more):
        options = EnvOptions("tether/Countdown-v0", 3, vectorization="subprocess", num_workers=2, **more)
        made.append(make_vector_env(options))
        made[-1].reset(0)
        return made[-1]

    yield make
    for env in made:
        env.close()


def kill(env, worker):
    process = env._workers[worker].process
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def test_a_worker_that_dies_is_replaced_and_its_episodes_are_lost(countdown):
    env = countdown()
    for _ in range(2):
        env.step(NOTHING)
    kill(env, 1)
    with pytest.warns(RuntimeWarning, match=r"environments 1 to 2 died \(exit code -9\) and is replaced"):
        step = env.step(NOTHING)
    assert step.valid.tolist() == [True, False, False]
    assert step.truncated.tolist() == [False, True, True]
    assert step.reward.tolist() == [3, 0, 0]
    assert step.obs[:, 0].tolist() == [3, 0, 0]
    step = env.step(NOTHING)
    assert step.valid is None
    assert step.reward.tolist() == [4, 1, 1]


def test_the_second_death_is_named(countdown):
    env = countdown()
    kill(env, 0)
    with pytest.warns(RuntimeWarning):
        env.step(NOTHING)
    kill(env, 0)
    with pytest.raises(RuntimeError, match=r"process of environments 0 to 0 died twice\. First: exit code -9\."):
        env.step(NOTHING)


def test_an_environment_that_raises_is_named(countdown):
    env = countdown()
    wrong = NOTHING + 7
    with pytest.warns(RuntimeWarning, match="AssertionError"):
        assert not env.step(wrong).valid.any()
    with pytest.raises(RuntimeError, match=r"died twice\. First: AssertionError"):
        env.step(wrong)


def test_a_waiting_environment_comes_back_at_its_next_beginning(countdown):
    env = countdown(pacing=Pacing(chunk=2))
    kill(env._env, 1)
    with pytest.warns(RuntimeWarning):
        assert env.step(NOTHING).valid.tolist() == [True, False, False]
    assert env.step(NOTHING).valid.tolist() == [True, False, False]
    assert env.step(NOTHING).reward.tolist() == [3, 1, 1]


def test_lost_episodes_are_not_counted():
    tracker = EpisodeTracker(2)
    rewards = np.ones((2, 2), dtype=np.float32)
    ended = np.array([[False, True], [False, False]])
    valid = np.array([[True, False], [True, True]])
    assert tracker.add(rewards, ended, valid, None) == ()
    (episode,) = tracker.add(rewards, np.array([[False, True], [False, False]]), np.ones((2, 2), dtype=bool), None)
    assert (episode.reward, episode.length) == (2.0, 2)


def test_what_cannot_be_made_is_said_here():
    with pytest.raises(ValueError, match=r"CartPole-v1 does not take its arguments"):
        make_vector_env(EnvOptions("CartPole-v1", 1, vectorization="subprocess", init_params={"gravity": 3}))
