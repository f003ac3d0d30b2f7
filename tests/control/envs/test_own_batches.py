"""Environments of a user's function that are stepped together: vector environments, tensors, JAX."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")
from gymnasium.vector import AutoresetMode  # noqa: E402

import tether  # noqa: E402
from tests.runs.control_run import RUN, assert_resume_is_exact  # noqa: E402
from tether.control.envs.make import EnvOptions, make_vector_env  # noqa: E402
from tether.control.policies.mlp_policy import make_policy  # noqa: E402
from tether.control.policies.networks import NetworkActor  # noqa: E402
from tether.control.policies.spec import PolicySpec  # noqa: E402
from tether.runtime.objects import register_objects  # noqa: E402

SPACES = gymnasium.spaces.Box(-100, 100, (2,), np.float32), gymnasium.spaces.Box(-1, 1, (1,), np.float32)

VECTOR = '''
import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class Counts(VectorEnv):
    """What is seen counts steps; an episode has five."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs, scale=1.0, render_mode=None):
        self.num_envs, self.scale, self.render_mode = num_envs, scale, render_mode
        self.single_observation_space = gymnasium.spaces.Box(0, 10, (1,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        self.t = np.zeros((self.num_envs, 1), np.float32)
        return self.t.copy(), {}

    def step(self, actions):
        self.t += 1
        ended = self.t[:, 0] == 5
        info = {"final_obs": np.array([*self.t, None], dtype=object)[:-1]} if ended.any() else {}
        self.t[ended] = 0
        return self.t.copy(), self.scale * actions, ended, np.zeros_like(ended), info

    def render(self):
        return tuple(np.full((16, 16, 3), 9, np.uint8) for _ in range(self.num_envs))


def counts(num_envs):
    return Counts(num_envs, 2.0)


def neither(num_envs):
    return 3


def fails(num_envs):
    raise RuntimeError("no simulator")


def forgets():
    return Counts(4)
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(VECTOR)
    return tmp_path / "mine.py"


@pytest.mark.parametrize("name", ["Counts", "counts"])
def test_a_function_of_their_number_gives_a_vector_environment(file: Path, name: str, tmp_path: Path) -> None:
    """Defaults, preflight, a test with another number, resuming, `load` and a video."""
    pytest.importorskip("imageio_ffmpeg")
    overrides = [f"env.train.id={file}:{name}", *RUN]
    whole = assert_resume_is_exact(tmp_path, overrides, 2)
    policy = tether.load(whole.directory)
    assert policy.predict(np.zeros((3, 1), np.float32)).shape == (3,)
    with pytest.raises(ValueError, match=r"env\.eval\.id: .* makes no single environment"):
        policy.make_env()
    if name == "Counts":
        env: Any = make_vector_env(EnvOptions(f"{file}:Counts", 2, init_params={"render_mode": "rgb_array"}))
        assert env.render().shape == (16, 16, 3)
    else:
        with pytest.raises(ValueError, match=r"It shows no pictures, which env\.eval\.video_cfg"):
            make_vector_env(EnvOptions(f"{file}:counts", 2, init_params={"render_mode": "rgb_array"}))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("neither", r"mine\.py:neither: takes num_envs and gives int; expected a gymnasium\.vector\.VectorEnv"),
        ("fails", r"mine\.py:fails: a call with .*'num_envs': 4.* raised RuntimeError: no simulator"),
        ("forgets", r"mine\.py:forgets: gives a VectorEnv, so it has to take their number as the argument num_envs"),
    ],
)
def test_a_function_that_gives_something_else_is_refused(file: Path, name: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make_vector_env(EnvOptions(f"{file}:{name}", 4))


class Robots:
    """A simulation of tensors: the second number seen is the sum of actions; robot i ends after 3 + i steps."""

    device = "cpu"

    def __init__(
        self, num_envs: int, mode: Any = None, last: str = "", change: Callable[[Any], Any] = lambda step: step
    ) -> None:
        self.num_envs, self.last = num_envs, last
        self.single_observation_space, self.single_action_space = SPACES
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.resets = mode is not AutoresetMode.DISABLED
        self.change = change

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        which = slice(None) if options is None else options["env_idx"]
        if options is None:
            self.seen = torch.zeros(self.num_envs, 2)
        self.seen[which] = 0
        return self.seen, {}

    def step(self, actions: Any) -> Any:
        assert isinstance(actions, torch.Tensor), "actions are handed over as tensors"
        assert float(actions.abs().max()) <= 1, "cut to their bounds"
        self.seen += torch.cat([torch.ones_like(actions), actions], dim=1)
        cut = self.seen[:, 0] >= 3 + torch.arange(self.num_envs)
        reward, info = self.seen[:, 1].clone(), {}
        if self.last:
            info[self.last] = self.seen.clone()
        if self.resets:
            self.seen[cut] = 0
        return self.change((self.seen, reward, torch.zeros_like(cut), cut, info))

    def close(self) -> None:
        pass


def changed(**changes: Callable[[Any], Any]) -> dict[str, Any]:
    """Robots of whose steps some values differ."""
    names = ("obs", "reward", "ends", "cut", "info")

    def change(step: Any) -> Any:
        return tuple(changes.get(name, lambda one: one)(value) for name, value in zip(names, step, strict=True))

    return {"change": change}


def stepped(**options: Any) -> list[Any]:
    """Three steps of two robots with the action 2, which is cut to 1."""
    with register_objects({"env": lambda num_envs: Robots(num_envs, **options)}):
        env = make_vector_env(EnvOptions("object:env", 2, env_type="tensors"))
        env.reset(1)
        return [env.step(np.full((2, 1), 2.0, np.float32)) for _ in range(3)]


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({"last": "final_obs"}, [3, 3]),
        ({"mode": AutoresetMode.SAME_STEP, "last": "final_observation"}, [3, 3]),
        ({"mode": AutoresetMode.DISABLED}, [3, 3]),
        ({}, [2, 2]),  # it is lost, and the one before stands for it
    ],
)
def test_robots_as_tensors_that_reset_themselves(options: dict[str, Any], last: list[float]) -> None:
    *_, before, end = stepped(**options)
    assert before.final_obs is None
    assert before.obs["state"].tolist() == [[2, 2], [2, 2]]  # not overwritten by later steps
    assert end.truncated.tolist() == [True, False]
    assert end.obs["state"].tolist() == [[0, 0], [3, 3]]
    assert end.reward.tolist() == [3, 3]
    assert end.final_obs["state"][0].tolist() == last


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mode": AutoresetMode.NEXT_STEP}, r"NEXT_STEP; env_type=tensors takes SAME_STEP, DISABLED"),
        ({"mode": "sometimes"}, r"object:env: its metadata\['autoreset_mode'\] is sometimes; env_type=tensors takes"),
        (changed(obs=lambda obs: obs[:, :1]), r"(?s)object:env: the observations .* are not 2 rows of Box"),
        (changed(obs=lambda obs: obs[:1]), r"(?s)object:env: the observations .* are not 2 rows of Box"),
        (changed(obs=lambda obs: obs.to("meta")), "(?s)object:env: the observation .* cannot be read"),
        (changed(reward=lambda reward: reward.to("meta")), "object:env: the reward .* cannot be read"),
        (changed(reward=lambda reward: reward.bfloat16()), "object:env: the reward .* cannot be read.*BFloat16"),
        (changed(reward=lambda reward: reward[:, None]), "(?s)object:env: the reward is .* not a number for each of 2"),
        (changed(cut=lambda cut: cut + 0.5), "object:env: `truncated` is .* neither True nor False"),
    ],
)
def test_what_is_no_simulation_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        stepped(**options)


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (3, "object:env: gives int without reset and step and close; expected environments with reset, step, close"),
        (gymnasium.Env(), "object:env: its single_observation_space is None; expected a gymnasium.Space"),
    ],
)
def test_what_is_neither_is_refused(made: Any, error: str) -> None:
    with register_objects({"env": lambda num_envs: made}), pytest.raises(ValueError, match=error):
        make_vector_env(EnvOptions("object:env", 2, env_type="tensors"))


def test_a_mask_of_tensors_that_nobody_reads_is_refused() -> None:
    class Masked(Robots):
        def reset(self, **options: Any) -> Any:
            obs, _ = super().reset(**options)
            return obs, {"action_mask": torch.ones(2, 1)}

    with (
        register_objects({"env": lambda num_envs: Masked(num_envs)}),
        pytest.raises(ValueError, match="of a Dict observation"),
    ):
        make_vector_env(EnvOptions("object:env", 2, env_type="tensors")).reset(1)


PUFFER = """
import gymnasium
import numpy as np


# The observation counts steps, the reward is the action. An episode has three steps, and the last agent does not act in
# the step after an end.
class Puffer:
    def __init__(self, num_envs, buf=None, seed=0):
        self.single_observation_space = gymnasium.spaces.Box(0, 10, (1,), np.uint8)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.num_agents = num_envs
        self.observations, self.actions = np.zeros((num_envs, 1), np.uint8), np.zeros(num_envs, np.int32)
        self.rewards, self.masks = np.zeros(num_envs, np.float32), np.ones(num_envs, bool)
        self.terminals, self.truncations = np.zeros(num_envs, bool), np.zeros(num_envs, bool)

    def reset(self, seed=None):
        self.observations[:], self.masks[:] = 0, True
        return self.observations, []

    def step(self, actions):
        assert isinstance(actions, np.ndarray)
        self.actions[:] = actions
        self.observations += self.masks[:, None]
        self.rewards[:] = self.actions
        self.masks[:] = True
        self.terminals[:] = self.observations[:, 0] == 3
        self.masks[-1] = not self.terminals[-1]
        self.observations[self.terminals] = 0
        return self.observations, self.rewards, self.terminals, self.truncations, [{"score": 1.0}]

    def close(self):
        pass
"""


def test_buffers_of_a_native_puffer_env(tmp_path: Path) -> None:
    """By hand: nothing is overwritten, and the steps of an agent that does not act are not valid; and a whole run."""
    (tmp_path / "mine.py").write_text(PUFFER)
    env = make_vector_env(EnvOptions(f"{tmp_path}/mine.py:Puffer", 2, env_type="tensors"))
    first = env.reset(1)
    steps = [env.step(np.array([[1], [0]])) for _ in range(7)]
    assert first["state"].tolist() == [[0], [0]]
    assert [step.obs["state"].ravel().tolist() for step in steps[:5]] == [[1, 1], [2, 2], [0, 0], [1, 0], [2, 1]]
    assert steps[0].reward.tolist() == [1, 0]
    assert [step.terminated.tolist() for step in steps[1:3]] == [[False, False], [True, True]]
    assert [step.valid is None for step in steps] == [True, True, True, False, True, True, True]
    assert steps[3].valid.tolist() == [True, False]
    assert steps[6].terminated.tolist() == [False, True]
    overrides = [*RUN, "env.train.env_type=tensors", f"env.train.id={tmp_path}/mine.py:Puffer"]
    run = tether.train(overrides=[*overrides, f"trainer.default_local_dir={tmp_path / 'run'}"])
    assert run.metrics[-1]["env/episode_len"] == 3
    assert run.metrics[-1]["perf/env_steps"] == 2 * 16 * 4 - 8  # one agent leaves every fourth step out
    options = EnvOptions("object:env", 3, env_type="tensors")
    with (
        register_objects({"env": lambda num_envs: Robots(2)}),
        pytest.raises(ValueError, match="has 2 environments, not the 3"),
    ):
        make_vector_env(options)


def test_a_run_of_tensors(tmp_path: Path) -> None:
    overrides = [*RUN, "env.train.env_type=tensors", f"trainer.default_local_dir={tmp_path / 'run'}"]
    run = tether.train(overrides=overrides, env=lambda num_envs: Robots(num_envs))
    assert run.metrics[-1]["env/episode_len"] >= 3
    policy = tether.load(run.folder)
    assert policy.predict(np.zeros(2, np.float32)).shape == (1,)
    with pytest.raises(ValueError, match=r"env\.eval\.env_type: tensors makes no single environment"):
        policy.make_env()
    with pytest.raises(ValueError, match=r"env\.train\.id=CartPole-v1: env\.train\.env_type=tensors takes a function"):
        make_vector_env(EnvOptions("CartPole-v1", 2, env_type="tensors"))


@pytest.mark.parametrize("more", [{}, {"normalize_observations": True}, {"lstm_dim": 3}], ids=str)
def test_the_actor_of_a_device_is_that_of_numpy(more: dict[str, Any]) -> None:
    """On the CPU here; elsewhere it is taken for perceptrons, too."""
    policy: Any = make_policy(PolicySpec(2, None, 1, hidden_dim=8, num_layers=1, **more), seed=0)
    if policy.normalizer:
        policy.normalizer.update(torch.randn(9, 2) * 3)
    rows = {"state": np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)}
    state, noise = np.ones((5, policy.state_width), np.float32), np.ones((5, 1), np.float32)
    for one, other in zip(policy.acting()(rows, noise, state), NetworkActor(policy)(rows, noise, state), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


JAX = '''
import gymnasium
import numpy as np
from jax import numpy as jnp
import jax


class Walk:
    """Right is rewarded. A start is drawn; beyond 2 it terminates."""

    observation_space = gymnasium.spaces.Dict(x=gymnasium.spaces.Box(-9, 9, (1,), np.float32))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, key):
        x = jax.random.uniform(key, (1,))
        return {"x": x}, x

    def step(self, key, state, action):
        move = 2.0 * action - 1
        x = state + move
        return {"x": x}, x, move, x[0] > 2, jnp.array(False)


def neither():
    return 3


def wide():
    env = Walk()
    env.observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    return env
'''


JAX_RUN = ["env.train.env_type=jax", "env.train.max_episode_steps=8"]


@pytest.mark.slow
def test_jax_environments(tmp_path: Path) -> None:
    """By hand, as one of them alone, and resumed exactly."""
    pytest.importorskip("jax")
    (tmp_path / "mine.py").write_text(JAX)
    options = EnvOptions(f"{tmp_path}/mine.py:Walk", 3, env_type="jax", max_episode_steps=3)
    env = make_vector_env(options)
    first = env.reset(5)["x"].copy()
    ends = np.array([[0], [1], [1]])
    one, two, three = [env.step(ends) for _ in range(3)]
    np.testing.assert_allclose(one.obs["x"][:, 0], first[:, 0] + [-1, 1, 1])
    assert two.terminated.tolist() == [False, True, True]  # 2 and more
    np.testing.assert_allclose(two.final_obs["x"][1:, 0], first[1:, 0] + 2)
    assert ((two.obs["x"][1:] >= 0) & (two.obs["x"][1:] < 1)).all()
    assert (two.obs["x"][1], two.obs["x"][2]) != (first[1], first[2])
    assert three.truncated.tolist() == [True, False, False]
    assert three.reward.tolist() == [-1, 1, 1]
    alone = make_vector_env(EnvOptions(options.id, 1, env_type="jax"))
    assert alone.reset(6)["x"][0] == first[1]
    with pytest.raises(ValueError, match=r"mine\.py:wide: the observations .* are not 3 rows of Box"):
        make_vector_env(EnvOptions(f"{tmp_path}/mine.py:wide", 3, env_type="jax")).reset(1)
    with pytest.raises(ValueError, match=r"mine\.py:neither: gives int without reset and step; expected environments"):
        make_vector_env(EnvOptions(f"{tmp_path}/mine.py:neither", 3, env_type="jax"))
    assert_resume_is_exact(tmp_path, [f"env.train.id={options.id}", *RUN, *JAX_RUN], 2)
