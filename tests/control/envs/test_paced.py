"""Environments that wait: for the end of a chunk or a rollout, in states that groups share."""

import re

import gymnasium
import numpy as np
import pytest

from tests.control.envs import toys
from tether.control.envs.make import EnvOptions, ResetPolicy, make_vector_env
from tether.observations import row_width

COUNTDOWN = "tether/Countdown-v0"  # 5 steps an episode; the reward is the number of the step


@pytest.fixture(autouse=True)
def _toys():
    toys.register()


def countdown(envs=2, vectorization="sync", **reset_policy):
    return make_vector_env(
        EnvOptions(
            COUNTDOWN, envs, vectorization=vectorization, num_workers=2, reset_policy=ResetPolicy(**reset_policy)
        )
    )


def play(env, steps):
    """(reward, truncated, valid, observation) of the first environment."""
    found = []
    for _ in range(steps):
        step = env.step(np.zeros((env.num_envs, 1), dtype=np.int64))
        valid = step.valid is None or bool(step.valid[0])
        found.append((float(step.reward[0]), bool(step.truncated[0]), valid, float(step.obs["state"][0, 0])))
    return found


@pytest.mark.parametrize("vectorization", ["sync", "subprocess"])
def test_the_rest_of_a_chunk_is_not_carried_out(vectorization):
    env = countdown(vectorization=vectorization, chunk=3)
    env.reset(0)
    assert play(env, 7) == [
        (1, False, True, 1), (2, False, True, 2), (3, False, True, 3),
        (4, False, True, 4), (5, True, True, 5), (0, False, False, 0), (1, False, True, 1),
    ]  # fmt: skip
    env.close()


def test_without_auto_reset_an_environment_waits_for_the_next_rollout():
    env = countdown(auto_reset=False)
    env.reset(0)
    assert [step[:3] for step in play(env, 8)][4:] == [(5, True, True)] + [(0, False, False)] * 3
    env.reset(0)
    assert play(env, 1) == [(1, False, True, 1)]


def starts(env, episodes):
    """First observations of each environment's episodes."""
    found = [env.reset(7)["state"][:, :2].tolist()]
    while len(found) < episodes:
        step = env.step(np.zeros((env.num_envs, 1), dtype=np.int64))
        if (step.terminated | step.truncated).all():
            found.append(step.obs["state"][:, :2].tolist())
    return found


def cartpole(**reset_policy):
    return make_vector_env(EnvOptions("CartPole-v1", 4, max_episode_steps=2, reset_policy=ResetPolicy(**reset_policy)))


def test_groups_share_their_start_states():
    for states in starts(cartpole(group_size=2), 3):
        assert states[0] == states[1] != states[2] == states[3]
    first, second, _ = starts(cartpole(group_size=2), 3)
    assert first != second
    env = cartpole(group_size=2)
    begun = env.reset(7)["state"]
    alone = gymnasium.make("CartPole-v1").reset(seed=int(env.seeds[2]))[0]
    assert begun[2].tolist() == alone.tolist(), "the seed is that of its reset"


def test_fixed_start_states_stay():
    env = cartpole(group_size=2, fixed_seed=3)
    first, second, _ = starts(env, 3)
    assert first == second == env.reset(8)["state"][:, :2].tolist()
    assert first[0] == first[1] != first[2]


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("vectorization", ["sync", "subprocess"])
def test_an_action_that_is_not_finite_never_reaches_the_simulator(vectorization, number):
    env = make_vector_env(EnvOptions("Pendulum-v1", 2, vectorization=vectorization))
    before = env.reset(0)["state"].copy()
    with pytest.raises(ValueError, match=r"Pendulum-v1: entry 0 of the action for environment 1 is (nan|inf)"):
        env.step(np.array([[0.5], [number]], dtype=np.float32))
    again = make_vector_env(EnvOptions("Pendulum-v1", 2))
    assert np.array_equal(again.reset(0)["state"], before)
    action = np.array([[0.5], [0.1]], dtype=np.float32)
    assert np.array_equal(env.step(action).obs["state"], again.step(action).obs["state"])
    env.close()


def test_wrappers_take_arguments(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import gymnasium\n"
        "class Shifted(gymnasium.RewardWrapper):\n"
        "    def __init__(self, env, by, name):\n"
        "        super().__init__(env)\n"
        "        self.by = {'two': by}[name]\n"
        "    def reward(self, reward):\n"
        "        return reward + self.by\n"
    )
    wrappers = ("gymnasium.wrappers:TimeLimit?max_episode_steps=3", f"{file}:Shifted?by=0.5&name=two")
    env = make_vector_env(EnvOptions("CartPole-v1", 1, wrappers=wrappers))
    env.reset(seed=0)
    steps = [env.step(np.zeros((1, 1), dtype=np.int64)) for _ in range(3)]
    assert [step.reward[0] for step in steps[:1]] == [1.5]
    assert bool(steps[2].truncated[0])


def test_wrappers_are_put_around():
    options = EnvOptions("CartPole-v1", 1, wrappers=("gymnasium.wrappers:TimeAwareObservation",))
    assert row_width(make_vector_env(options).layout) == 5


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gymnasium.wrappers:Nothing", r"is no module:Class"),
        ("gymnasium.wrappers", r"is no module:Class"),
        (":ClipReward", r"is no module:Class"),
        ("nowhere.at:All", r"needs nowhere, which is no installed module"),
        ("gymnasium.wrappers:TimeLimit", r"does not wrap an environment \(.*max_episode_steps.*TimeLimit\?name=value"),
        (
            "gymnasium.wrappers:TimeLimit?steps=3",
            r"does not wrap an environment \(.*unexpected keyword argument 'steps'",
        ),
        ("gymnasium.wrappers:TimeLimit?steps", r"does not wrap an environment \(bad query field: 'steps'\)"),
    ],
)
def test_what_is_no_wrapper(name, says):
    with pytest.raises(ValueError, match=rf"env\.train\.wrappers: {re.escape(name)} {says}"):
        make_vector_env(EnvOptions("CartPole-v1", 1, wrappers=(name,)))
