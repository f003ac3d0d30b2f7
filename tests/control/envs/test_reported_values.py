"""What environments report beside the observation, in every form that users' environments have it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tether.control.envs.loop import SyncVectorEnv

gymnasium = pytest.importorskip("gymnasium")
FLAT = gymnasium.spaces.Box(-1, 1, (2,), np.float32)


class Scripted(gymnasium.Env):
    """Episodes of `length` steps whose last step alone reports the next of `flags`; observations are `obs`."""

    def __init__(self, flags=(True, False), length=2, space=FLAT, obs=(0.0, 0.0)):
        self.observation_space, self.action_space = space, gymnasium.spaces.Discrete(2)
        self.flags, self.length, self.obs, self.episode = flags, length, obs, -1

    def reset(self, *, seed=None, options=None):
        self.steps, self.episode = 0, self.episode + 1
        return np.array(self.obs), {}

    def step(self, action):
        self.steps += 1
        ended = self.steps == self.length
        info = {"is_success": self.flags[self.episode % len(self.flags)]} if ended else {}
        return np.array(self.obs), 0.0, ended, False, info


def vector(*makes: Callable[[], gymnasium.Env]) -> SyncVectorEnv:
    remaining = iter(makes)
    env = SyncVectorEnv("mine", lambda: next(remaining)(), len(makes))
    env.reset(0)
    return env


def successes(env: SyncVectorEnv, steps: int) -> list[list[bool] | None]:
    flags = []
    for _ in range(steps):
        success = env.step(np.zeros((env.num_envs, 1), dtype=np.int64)).success
        flags.append(None if success is None else success.tolist())
    return flags


def test_a_success_flag_is_of_its_own_step_alone():
    """Environments of other lengths report in between: their steps must not bring back an older flag."""
    env = vector(Scripted, lambda: Scripted(flags=(False,), length=3))
    assert successes(env, 6) == [None, [True, False], [False, False], [False, False], None, [True, False]]


@pytest.mark.parametrize("flag", ["no", "True", 0.5, [True, False], np.array([1, 0])])
def test_a_success_flag_that_is_none_is_refused(flag):
    env = vector(lambda: Scripted(flags=(flag,), length=1))
    with pytest.raises(ValueError, match=r"mine, environment 0: info\['is_success'\] is .* neither True nor False"):
        successes(env, 1)


@pytest.mark.parametrize("flag", [1, 1.0, np.True_, np.float32(1), np.array(1)])
def test_a_success_flag_may_be_a_number(flag):
    assert successes(vector(lambda: Scripted(flags=(flag,), length=1)), 1) == [[True]]


@pytest.mark.parametrize(("dtype", "obs"), [(np.uint8, (0.2, 0.8)), (np.int64, (0.2, 0.8)), (np.uint8, (300, -1))])
def test_integer_observations_are_neither_cut_nor_wrapped(dtype, obs):
    space = gymnasium.spaces.Box(0, 100, (2,), dtype)
    with pytest.raises(
        ValueError, match=rf"environment 0: the observation .* is not in Box\(0, 100, \(2,\), {dtype.__name__}"
    ):
        vector(lambda: Scripted(space=space, obs=obs))


def test_an_observation_of_another_size_is_not_broadcast():
    space = gymnasium.spaces.Dict(a=FLAT)

    class Short(Scripted):
        def reset(self, *, seed=None, options=None):
            return {"a": np.zeros(1, np.float32)}, {}

    with pytest.raises(ValueError, match="environment 0: the observation"):
        vector(lambda: Short(space=space))


class Vectorized(gymnasium.vector.VectorEnv):
    """Two environments that reset within the step that ends their episode of two steps."""

    def __init__(self, metadata, flag=np.bool_, infos=None):
        self.metadata, self.num_envs = metadata, 2
        self.single_observation_space, self.single_action_space = FLAT, gymnasium.spaces.Discrete(2)
        self.flag, self.infos, self.steps = flag, infos or {}, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros((2, 2), np.float32), {}

    def step(self, actions):
        self.steps += 1
        ended = np.full(2, self.steps % 2 == 0).astype(self.flag)
        infos = {name: value(ended) for name, value in self.infos.items()}
        return np.zeros((2, 2), np.float32), np.ones(2), ended, np.zeros(2, self.flag), infos


def two_steps(env):
    from tether.control.envs.gymnasium_vector import GymnasiumVectorEnv

    adapted = GymnasiumVectorEnv("mine", env)
    adapted.reset(0)
    return [adapted.step(np.zeros((2, 1), dtype=np.int64)) for _ in range(3)]


@pytest.mark.parametrize("flag", [np.bool_, np.uint8, np.int64, np.float32])
def test_flags_of_a_vector_environment_may_be_numbers(flag):
    """Their bitwise inverse would make every step valid."""
    _, second, third = two_steps(Vectorized({"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}, flag))
    assert second.terminated.dtype == np.bool_
    assert second.terminated.tolist() == [True, True]
    assert third.valid.tolist() == [False, False]


def test_the_flags_of_who_reports_success_may_be_numbers():
    """Their bitwise inverse would be indices."""
    infos = {
        "success": lambda ended: np.array([1, 1]),
        "_success": lambda ended: np.array([1, 0], np.uint8),
    }
    first, *_ = two_steps(Vectorized({}, infos=infos))
    assert first.success.tolist() == [True, False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"flag": np.dtype("U1")}, "`terminated` is .* neither True nor False"),
        (
            {"infos": {"is_success": lambda ended: np.array([2, 0])}},
            r"info\['is_success'\] is .* neither True nor False",
        ),
        ({"infos": {"success": lambda ended: np.array([True])}}, r"info\['success'\] is .* not one flag"),
        (
            {"infos": {"success": lambda ended: np.ones(2), "_success": lambda ended: np.ones(3)}},
            r"info\['_success'\] is .* not one flag",
        ),
        ({"infos": {"final_observation": lambda ended: None}}, "autoreset_mode'] is missing, which means NEXT_STEP"),
    ],
)
def test_what_a_vector_environment_cannot_mean_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        two_steps(Vectorized({}, **change))


ENVIRONMENT = """
import gymnasium, numpy as np

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    seed = 42  # not a method

    def __init__(self, max_episode_steps=10, id="none"):
        self.length, self.name = max_episode_steps, id

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.array([0.0, 2.0]), {}  # float64, and beyond a bound

    def step(self, action):
        self.steps += 1
        return np.zeros(2), 1.0, self.steps == self.length, False, {}

gymnasium.register("Registered-v0", Env)

def many(num_envs, max_episode_steps=10):
    make = lambda: Env(max_episode_steps)
    return gymnasium.vector.SyncVectorEnv([make] * num_envs)
"""


def test_every_argument_reaches_an_environment_of_ones_own(tmp_path: Path):
    """Gymnasium's `make` takes some names for itself, and would turn this length into a truncation."""
    from tether.control.envs.make import EnvOptions, make_vector_env

    file = tmp_path / "mine.py"
    file.write_text(ENVIRONMENT)
    for name, more in ("Env", {"id": "x"}), ("many", {}):
        env = make_vector_env(EnvOptions(f"{file}:{name}", 1, init_params={"max_episode_steps": 3, **more}))
        env.reset(0)
        ends = [env.step(np.zeros((1, 1), dtype=np.int64)) for _ in range(3)]
        assert (ends[-1].terminated.tolist(), ends[-1].truncated.tolist()) == ([True], [False]), name
        env.close()
    with pytest.raises(ValueError, match=r"max_episode_steps: Gymnasium takes .* Set env\.train\.max_episode_steps\."):
        make_vector_env(EnvOptions(f"{file}:Registered-v0", 1, init_params={"max_episode_steps": 3}))
