"""Adapters of simulators that are seldom installed: what they make of a simulator's steps, shown on stand-ins."""

import importlib.util
import sys
from types import ModuleType

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.control.envs import libero_stand_in
from tether.config import load_config
from tether.control.envs.make import EnvOptions, ResetPolicy, make_one, make_vector_env
from tether.observations import decode_text, describe, row_width

STATE = spaces.Box(-np.inf, np.inf, (2,), np.float32)
ACTION = spaces.Box(-1, 1, (1,), np.float32)


class Batch(gymnasium.Env):
    """ManiSkill's batched API: tensors. Environment i succeeds at its step i + 2; all are cut at their 4th.

    The observation is (episodes begun here, steps of the episode), and its tensor is written over by the next call.
    """

    single_observation_space, single_action_space = STATE, ACTION
    observation_space, action_space = STATE, ACTION

    def __init__(self, num_envs=1, **arguments):
        self.num_envs, self.arguments, self.closed = num_envs, arguments, False
        self._obs = torch.zeros(num_envs, 2)

    def reset(self, *, seed=None, options=None):
        where = torch.arange(self.num_envs) if options is None else options["env_idx"]
        self.seeds = seed
        self._obs[where, 0] += 1
        self._obs[where, 1] = 0
        return self._obs, {}

    def step(self, action):
        assert action.shape == (self.num_envs, 1)
        assert action.abs().max() <= 1
        self._obs[:, 1] += 1
        success = self._obs[:, 1] == torch.arange(self.num_envs) + 2
        return self._obs, action[:, 0] * 10, success, self._obs[:, 1] >= 4, {"success": success}

    def close(self):
        self.closed = True


class OneOfBatch(gymnasium.Wrapper):
    """ManiSkill's CPUGymWrapper: a batch of one as plain numbers."""

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=seed)[0][0].numpy().copy(), {}

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(torch.as_tensor(action)[None])
        return obs[0].numpy().copy(), float(reward), bool(terminated), bool(truncated), {"success": info["success"][0]}


def module(monkeypatch, name, **contents):
    made = ModuleType(name)
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture
def mani_skill(monkeypatch):
    for name in ("mani_skill", "mani_skill.utils", "mani_skill.utils.wrappers"):
        module(monkeypatch, name)
    module(monkeypatch, "mani_skill.envs")
    sys.modules["mani_skill"].envs = sys.modules["mani_skill.envs"]
    module(monkeypatch, "mani_skill.utils.registration", REGISTERED_ENVS={"Pick-v1": None})
    module(monkeypatch, "mani_skill.utils.wrappers.gymnasium", CPUGymWrapper=OneOfBatch)
    sys.modules.pop("tether.integrations.robots.maniskill", None)
    made = []

    def make(**arguments):
        made.append(Batch(**arguments))
        return made[-1]

    gymnasium.register("Pick-v1", entry_point=make, order_enforce=False)
    yield made
    del gymnasium.registry["Pick-v1"]
    sys.modules.pop("tether.integrations.robots.maniskill", None)


def pick(num_envs, backend, **more):
    return EnvOptions("Pick-v1", num_envs, env_type="maniskill", init_params={"sim_backend": backend}, **more)


def test_a_batch_restarts_episodes_and_keeps_their_last_observations(mani_skill):
    env = make_vector_env(pick(3, "gpu"))
    assert mani_skill[0].arguments == {"sim_backend": "gpu", "obs_mode": "state", "render_backend": "none"}
    assert env.reset(7)["state"].tolist() == [[1, 0], [1, 0], [1, 0]]
    assert mani_skill[0].seeds == [7, 8, 9]
    steps = [env.step(np.array([[0.5], [9.0], [-9.0]], dtype=np.float32)) for _ in range(4)]
    assert steps[0].reward.tolist() == [5, 10, -10]  # cut to the bounds
    assert (steps[0].obs["state"].tolist(), steps[0].final_obs) == ([[1, 1]] * 3, None)
    assert steps[1].terminated.tolist() == steps[1].success.tolist() == [True, False, False]
    assert steps[1].final_obs["state"][0].tolist() == [1, 2]
    assert steps[1].obs["state"].tolist() == [[2, 0], [1, 2], [1, 2]]
    assert steps[2].obs["state"].tolist() == [[2, 1], [2, 0], [1, 3]]
    assert steps[3].truncated.tolist() == [False, False, True]
    assert steps[3].terminated.tolist() == steps[3].success.tolist() == [True, False, True]
    env.close()
    assert mani_skill[0].closed


def test_a_batch_goes_on_after_success_where_terminations_are_ignored(mani_skill):
    env = make_vector_env(pick(2, "gpu", ignore_terminations=True))
    env.reset(0)
    steps = [env.step(np.zeros((2, 1), dtype=np.float32)) for _ in range(4)]
    assert not any(step.terminated.any() for step in steps)
    assert [step.success.tolist() for step in steps[1:3]] == [[True, False], [False, True]]
    assert steps[3].truncated.all()


def test_on_a_cpu_they_are_stepped_one_by_one_in_groups_and_chunks_too(mani_skill):
    env = make_vector_env(pick(2, "cpu", reset_policy=ResetPolicy(chunk=3)))
    assert [made.num_envs for made in mani_skill] == [1, 1]
    env.reset(0)
    rest = np.zeros((2, 1), dtype=np.float32)
    env.step(rest)
    second = env.step(rest)
    assert second.terminated.all()
    assert second.success.all()
    third = env.step(rest)
    assert third.valid.tolist() == [False, False]
    assert third.obs["state"].tolist() == [[2, 0], [2, 0]]


def test_what_a_batch_cannot_do_and_unknown_names_are_refused(mani_skill):
    with pytest.raises(ValueError, match=r"gpu simulates all environments at once.*sim_backend=cpu"):
        make_vector_env(pick(2, "gpu", reset_policy=ResetPolicy(group_size=2)))
    with pytest.raises(ValueError, match=r"ManiSkill has no Pack-v1\. Did you mean Pick-v1\?"):
        make_vector_env(EnvOptions("Pack-v1", 1, env_type="maniskill", init_params={"sim_backend": "cpu"}))


def test_a_simulation_on_a_gpu_that_is_not_there_says_so(mani_skill, monkeypatch):
    def find_device(*_, **arguments):
        if arguments["sim_backend"] == "gpu":
            raise RuntimeError('failed to find device "cuda"')  # SAPIEN's words
        return Batch(**arguments)

    monkeypatch.setattr(gymnasium.registry["Pick-v1"], "entry_point", find_device)
    with pytest.raises(ValueError, match=r"gpu simulates on a GPU, and none is found. Set env.*sim_backend=cpu"):
        make_vector_env(pick(2, "gpu"))
    make_vector_env(pick(2, "cpu"))


@pytest.fixture
def libero(monkeypatch):
    libero_stand_in.install(monkeypatch)
    yield
    sys.modules.pop("tether.integrations.robots.libero", None)


def spatial(**more):
    return EnvOptions("libero_spatial/1", 2, env_type="libero", **more)


@pytest.mark.usefixtures("libero")
def test_libero_begins_in_start_states_and_ends_with_success():
    env = make_vector_env(spatial())
    assert (row_width(env.layout), env.actions.width) == (3, 7)
    first = env.reset(0)["state"].copy()
    assert first[:, 0].tolist() == [10, 10]  # objects have settled
    assert set(first[:, 1]) <= {5, 6}
    assert np.array_equal(first, env.reset(0)["state"])
    assert len({tuple(env.reset(seed)["state"][:, 1]) for seed in range(9)}) > 1
    still = np.zeros((2, 7), dtype=np.float32)
    steps = [(step.reward.tolist(), step.terminated.all(), step.success.all()) for step in map(env.step, [still] * 3)]
    assert steps == [([0, 0], False, False), ([0, 0], False, False), ([1, 1], True, True)]


@pytest.mark.usefixtures("libero")
def test_libero_is_cut_by_its_time_limit_and_shows_pictures_upright():
    env = make_vector_env(spatial(max_episode_steps=2, init_params={"cameras": ["agentview"]}))
    assert describe(env.layout) in ("agentview (2, 3, 3), state (3,)", "state (3,), agentview (2, 3, 3)")
    assert env.reset(0)["agentview"][:, 1].min() == 255
    env.step(np.zeros((2, 7), dtype=np.float32))
    last = env.step(np.zeros((2, 7), dtype=np.float32))
    assert last.truncated.all()
    assert not last.terminated.any()


PUBLISHED = {
    "cameras": ["agentview", "robot0_eye_in_hand"], "mirrored": True, "state": "hand", "instruction": True,
    "settling_steps": 15, "camera_heights": 2,
}  # fmt: skip


@pytest.mark.usefixtures("libero")
def test_a_suite_of_libero_draws_each_start_state_of_each_task_alike():
    env = make_vector_env(EnvOptions("libero_spatial", 40, env_type="libero", init_params={"state": "hand"}))
    begun = np.concatenate([env.reset(40 * seed)["state"].copy() for seed in range(5)])
    pairs, counts = np.unique(begun[:, [2, 1]], axis=0, return_counts=True)
    assert pairs.tolist() == [[0, 5], [0, 6], [0, 7], [1, 5], [1, 6]]
    assert counts.min() > 200 / 5 / 2
    assert np.array_equal(env.reset(120)["state"], begun[120:160])  # whatever the episodes before were


@pytest.mark.usefixtures("libero")
def test_libero_as_published_policies_see_it():
    env = make_vector_env(EnvOptions("libero_spatial", 1, env_type="libero", init_params=PUBLISHED))
    parts = {part.name: (part.kind, part.shape) for part in env.layout}
    pictures = [name for name in parts if parts[name][0] == "image"]
    assert pictures == ["agentview", "robot0_eye_in_hand"]  # the order in which a policy reads them
    assert (parts["state"], parts["task"]) == (("vector", (8,)), ("text", (len("pick up the bowl"),)))
    obs = env.reset(1)
    position, turn, fingers = np.split(obs["state"][0], [3, 6])
    assert position[0] == 15  # idle steps
    np.testing.assert_allclose(turn, [0, 0, np.pi / 2], atol=1e-6)
    np.testing.assert_allclose(fingers, [0.1, -0.1], atol=1e-6)
    assert decode_text(obs["task"][0]) == ["pick up the bowl", "open it"][int(position[2])]
    picture = obs["agentview"][0]
    assert picture[1].min() == 255  # upright
    assert picture[0, :, 0].tolist() == [0, 0, 9]  # mirrored


@pytest.mark.usefixtures("libero")
def test_libero_is_filmed_with_a_camera_only():
    arguments = {"cameras": ["agentview"], "mirrored": True, "render_mode": "rgb_array"}
    env = make_one(EnvOptions("libero_spatial/0", 1, env_type="libero", init_params=arguments))
    env.reset(seed=0)
    assert env.render()[0, :, 0].tolist() == [9, 0, 0]  # as it is
    with pytest.raises(ValueError, match=r"without a camera LIBERO shows no pictures.*cameras=\[agentview\]"):
        make_one(EnvOptions("libero_spatial/0", 1, env_type="libero", init_params={"render_mode": "rgb_array"}))
    with pytest.raises(ValueError, match=r"init_params\.state is 'arm'\. Use full or hand\."):
        make_one(EnvOptions("libero_spatial/0", 1, env_type="libero", init_params={"state": "arm"}))


@pytest.mark.usefixtures("libero")
@pytest.mark.parametrize(
    ("name", "says"), [("libero_spacial/0", "no suite libero_spacial"), ("libero_spatial/2", "none of the 2 tasks")]
)
def test_libero_names_what_there_is(name, says):
    with pytest.raises(ValueError, match=says):
        make_vector_env(EnvOptions(name, 1, env_type="libero"))


@pytest.mark.parametrize("extra", ["maniskill", "libero", "metaworld"])
def test_a_missing_simulator_names_its_extra(extra):
    package = {"maniskill": "mani_skill"}.get(extra, extra)
    if package in sys.modules or importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(ValueError, match=rf"env.train.id: Any.*pip install .*\[{extra}\]'"):
        make_vector_env(EnvOptions("Any", 1, env_type=extra))


def test_chunks_are_for_every_simulator_that_is_stepped_one_by_one():
    chunks = ["env.train.id=reach-v3", "policy.num_action_chunks=4", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    assert load_config(None, [*chunks, "env.train.env_type=metaworld"]).config.policy.num_action_chunks == 4
    with pytest.raises(ValueError, match="envpool begins episodes by itself"):
        load_config(None, [*chunks, "env.train.env_type=envpool"])
