"""Every way of stepping gives the same episodes: in a loop, in subprocesses, in each autoreset mode."""

import random
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv as GymnasiumSync

from tests.control.envs import toys
from tether.control.envs.gymnasium_vector import GymnasiumVectorEnv
from tether.control.envs.make import EnvOptions, make_vector_env, spaces_of
from tether.runtime.global_rng import seed_rng

LIMIT, ENVS, STEPS = 5, 3, 17


def gymnasium_vector(mode, ends=10**6):
    def make():
        return gymnasium.wrappers.TimeLimit(toys.Countdown(ends), LIMIT)

    return GymnasiumVectorEnv("Countdown", GymnasiumSync([make] * ENVS, autoreset_mode=mode))


def loop(ends=10**6):
    toys.register()
    return make_vector_env(EnvOptions("tether/Countdown-v0", ENVS, init_params={"ends": ends}))


MAKERS = {
    "loop": loop,
    **{
        mode: lambda ends=10**6, mode=mode: gymnasium_vector(mode, ends)
        for mode in ("SameStep", "NextStep", "Disabled")
    },
}


def valid_steps(env, steps=STEPS):
    """(reward, terminated, truncated, final observation or None, success) of the valid steps of each environment."""
    env.reset(seed=0)
    found = [[] for _ in range(env.num_envs)]
    for _ in range(steps):
        step = env.step(np.zeros((env.num_envs, 1), dtype=np.int64))
        for n in range(env.num_envs):
            if step.valid is None or step.valid[n]:
                ended = bool(step.terminated[n] or step.truncated[n])
                final = float(step.final_obs["state"][n, 0]) if ended else None
                success = None if step.success is None else bool(step.success[n])
                flags = bool(step.terminated[n]), bool(step.truncated[n])
                found[n].append((float(step.reward[n]), *flags, final, success))
    env.close()
    return found


@pytest.mark.parametrize("ends", [3, 10**6])
@pytest.mark.parametrize("name", MAKERS)
def test_the_same_episodes_in_every_mode(name, ends):
    for steps in valid_steps(MAKERS[name](ends)):
        length = min(ends, LIMIT)
        assert len(steps) >= STEPS - STEPS // length
        for i, step in enumerate(steps):
            t = i % length + 1
            last = t == length
            assert step[:4] == (t, last and ends == 3, last and ends != 3, float(t) if last else None)
            assert step[4] is (t == 2)


def test_observations_start_over():
    env = loop()
    env.reset(0)
    seen = [float(env.step(np.zeros((ENVS, 1), dtype=np.int64)).obs["state"][0, 0]) for _ in range(7)]
    assert seen == [1, 2, 3, 4, 0, 1, 2]


def test_ignored_terminations_go_on_to_the_limit():
    toys.register()
    env = make_vector_env(EnvOptions("tether/Countdown-v0", 1, ignore_terminations=True, init_params={"ends": 3}))
    assert [step[1:3] for step in valid_steps(env, 5)[0]] == [(False, False)] * 4 + [(False, True)]


@pytest.mark.parametrize("workers", [1, 2])
def test_subprocesses(workers):
    options = EnvOptions("CartPole-v1", 2, vectorization="subprocess", num_workers=workers, max_episode_steps=4)
    with_processes = valid_steps(make_vector_env(options), 12)
    in_a_loop = valid_steps(
        make_vector_env(EnvOptions("CartPole-v1", 2, vectorization="sync", max_episode_steps=4)), 12
    )
    for ours, theirs in zip(with_processes, in_a_loop, strict=True):
        assert ours == theirs[: len(ours)]


def test_own_vector_code_is_taken_where_it_pays():
    assert isinstance(make_vector_env(EnvOptions("CartPole-v1", 8))._env, GymnasiumVectorEnv)
    assert not isinstance(make_vector_env(EnvOptions("CartPole-v1", 2))._env, GymnasiumVectorEnv)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EnvOptions("CartPole-v9", 1), r"env\.train\.id: no .* registered as CartPole-v9\. Did you mean CartPole-v1"),
        (EnvOptions("Zzzzz", 1, role="env.eval"), r"env\.eval\.id: .* gymnasium\.pprint_registry"),
        (EnvOptions("Acrobot-v1", 8, vectorization="vector"), r"Acrobot-v1 has no vector code of its own"),
        (EnvOptions("nosuchmodule:Env-v0", 1), r"needs a package that is not installed"),
    ],
)  # fmt: skip
def test_bad_names(options, message):
    with pytest.raises(ValueError, match=message):
        make_vector_env(options)


@pytest.mark.parametrize("vectorization", ["sync", "subprocess"])
@pytest.mark.parametrize(
    ("module", "family", "env", "extra"),
    [
        ("mujoco", "mujoco", "HalfCheetah-v5", "mujoco"),
        ("Box2D", "box2d", "LunarLander-v3", "box2d"),
        ("Box2D", "box2d", "BipedalWalker-v3", "box2d"),
    ],
)
def test_a_missing_extra_is_named(module, family, env, extra, vectorization, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    for name in [name for name in sys.modules if name.startswith(f"gymnasium.envs.{family}")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=rf"{env} needs .*pip install .*\[{extra}\]'"):
        make_vector_env(EnvOptions(env, 1, vectorization=vectorization))
    with pytest.raises(ValueError, match=rf"{env} needs .*pip install .*\[{extra}\]'"):
        spaces_of(EnvOptions(env, 1))


class Draws(gymnasium.Env):
    """Shows what the global generators of its process give at the first reset."""

    observation_space = gymnasium.spaces.Box(0, 1, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([np.random.rand(), random.random(), torch.rand(()).item()]), {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}


def test_global_generators_differ_between_processes_and_follow_from_the_runs():
    def draws(seed):
        seed_rng(seed)
        env = make_vector_env(EnvOptions("tests/Draws-v0", 3, vectorization="subprocess", num_workers=3))
        seen = env.reset(0)["state"].copy()
        env.close()
        return seen

    if "tests/Draws-v0" not in gymnasium.registry:
        gymnasium.register("tests/Draws-v0", entry_point=Draws)
    seen = draws(1)
    assert all(len(set(column)) == 3 for column in seen.T.tolist())
    assert np.array_equal(seen, draws(1))
    assert not np.array_equal(seen, draws(2))


def test_envpool_plays_the_same_game():
    pytest.importorskip("envpool")
    env = make_vector_env(EnvOptions("CartPole-v1", 2, env_type="envpool", max_episode_steps=4))
    for steps in valid_steps(env, 11):
        assert [step[2] for step in steps[:8]] == [False, False, False, True] * 2
        assert all(step[0] == 1.0 for step in steps)
    with pytest.raises(ValueError, match=r"envpool has no CartPol-v1\. Did you mean CartPole-v1"):
        make_vector_env(EnvOptions("CartPol-v1", 2, env_type="envpool"))
