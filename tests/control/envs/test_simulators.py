"""Simulators that are extras: each gives what a policy can read, where it is installed."""

import importlib
import sys
from importlib.metadata import version

import numpy as np
import pytest

from tests.runs.tiny_run import measured
from tether.config import load_config
from tether.control.build import build_control_run
from tether.control.envs.make import EnvOptions, ObservationOptions, ResetPolicy, make_vector_env
from tether.control.envs.protocol import ContinuousActions, DiscreteActions
from tether.observations import copied, row_width

FETCH = EnvOptions("gymnasium_robotics:FetchReach-v4", 1, max_episode_steps=10)
PICTURE = EnvOptions("MiniGrid-Empty-5x5-v0", 2, max_episode_steps=10, view=ObservationOptions(drop=("mission",)))
REACH = EnvOptions("metaworld:Meta-World/MT1", 2, max_episode_steps=10, init_params={"env_name": "reach-v3", "seed": 1})
PUSH = EnvOptions("push-v3", 2, env_type="metaworld", max_episode_steps=10)
MT10 = EnvOptions("MT10", 2, env_type="metaworld", max_episode_steps=10)
CUBE = EnvOptions("PickCube-v1", 2, env_type="maniskill", max_episode_steps=10, init_params={"sim_backend": "cpu"})
ARM = ContinuousActions(4)
CASES = {  # direction, and 7 x 7 cells of three numbers; position, goal and state of the arm; one entry a task
    "minigrid": ("minigrid", PICTURE, 151, DiscreteActions((7,))),
    "FetchReach": ("gymnasium_robotics", FETCH, 16, ARM),
    "MT1 reach": ("metaworld", REACH, 39, ARM),
    "push": ("metaworld", PUSH, 39, ARM),
    "MT10": ("metaworld", MT10, 49, ARM),
    "PickCube": ("mani_skill", CUBE, 42, ContinuousActions(8)),
}


def has_vulkan():
    sapien = importlib.import_module("sapien")
    try:
        sapien.render.RenderMaterial()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("name", CASES)
def test_a_simulator_is_stepped_and_learned_from(name, tmp_path):
    module, options, width, actions = CASES[name]
    pytest.importorskip(module)
    if module == "gymnasium_robotics" and int(version("mujoco").split(".")[0]) >= 4:
        pytest.skip("gymnasium-robotics 1.4 does not know the joints of mujoco 4")
    if module == "mani_skill" and not has_vulkan():
        with pytest.raises(ValueError, match="PickCube-v1 finds no Vulkan driver"):
            make_vector_env(options)
        pytest.skip("ManiSkill's tasks need a Vulkan driver even where nothing is drawn")
    env = make_vector_env(options)
    assert (row_width(env.layout), env.actions) == (width, actions)
    obs, again = copied(env.reset(0)), env.reset(0)
    assert all(np.array_equal(obs[name], part) for name, part in again.items())  # equal seeds, equal starts
    differ = [not np.array_equal(part[0], part[1]) for part in obs.values() if len(part) > 1]
    assert options.num_envs == 1 or module == "minigrid" or any(differ)
    whole = isinstance(actions, DiscreteActions)
    chosen = np.full((options.num_envs, actions.width), 2 if whole else 0.5, dtype=np.int64 if whole else np.float32)
    steps = [env.step(chosen) for _ in range(10)]
    assert steps[-1].truncated.all()
    assert steps[-1].success is not None
    env.close()
    run = build_control_run(
        load_config(
            None,
            [
                f"env.train.id={options.id}", f"env.train.env_type={options.env_type}",
                "env.train.total_num_envs=2", "env.train.max_episode_steps=10",
                *[f"env.train.init_params.{key}={value}" for key, value in options.init_params.items()],
                "env.train.max_steps_per_rollout_epoch=20",
                "actor_rollout_ref.actor.ppo_mini_batch_size=20", "trainer.total_training_steps=2",
                "trainer.logger=file", "trainer.save_freq=-1", "trainer.log_freq=1", "env.eval.num_episodes=2",
                "trainer.test_freq=2", f"trainer.default_local_dir={tmp_path}",
            ],
        )
    )  # fmt: skip
    run.trainer.fit()
    run.close()
    last = measured(tmp_path)[2]
    assert last["env/episode_len"] == 10
    for metric in ("env/success_once", "env/success_at_end", "eval/success_once"):
        assert metric in last


def test_a_suite_of_metaworld_draws_its_tasks_by_the_seed():
    pytest.importorskip("metaworld")
    groups = EnvOptions("MT10", 6, env_type="metaworld", reset_policy=ResetPolicy(group_size=2))
    env = make_vector_env(groups)
    obs = env.reset(3)["state"]
    tasks = obs[:, 39:]
    assert np.array_equal(tasks.sum(axis=1), np.ones(6))
    assert np.array_equal(obs[::2], obs[1::2])  # a group is one task with one goal
    assert len({tuple(task) for task in tasks.tolist()}) > 1
    env.close()


def test_names_and_numbers_that_metaworld_does_not_have_are_refused():
    pytest.importorskip("metaworld")
    with pytest.raises(ValueError, match=r"MetaWorld has no reach-v2\. Did you mean reach-v3"):
        make_vector_env(EnvOptions("reach-v2", 1, env_type="metaworld"))
    with pytest.raises(ValueError, match=r"total_num_envs: 8, but .* always makes 10\. Set it to 10"):
        make_vector_env(EnvOptions("metaworld:Meta-World/MT10", 8))


def test_minigrid_tells_success_and_drops_its_mission():
    pytest.importorskip("minigrid")
    env = make_vector_env(PICTURE)
    assert [(part.name, part.kind, part.shape) for part in env.layout] == [
        ("direction", "vector", (1,)), ("image", "image", (7, 7, 3)),
    ]  # fmt: skip
    env.reset(0)
    path = [2, 2, 1, 2, 2]  # forward twice, a turn to the right, forward twice
    steps = [env.step(np.full((2, 1), action)) for action in path]
    assert steps[-1].success.all()
    assert steps[-1].terminated.all()
    env.close()
    with pytest.raises(
        ValueError, match=r"no policy reads .*Mission.* leave a part of a Dict out with env\.train\.drop"
    ):
        make_vector_env(EnvOptions("MiniGrid-Empty-5x5-v0", 1))


def test_minigrid_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(ValueError, match=r"needs a package that is not installed .* pip install .*\[minigrid\]'"):
        make_vector_env(EnvOptions("MiniGrid-Nowhere-v0", 1))


def test_a_missing_simulator_says_what_to_install():
    for module, extra in {"minigrid": "minigrid", "metaworld": "metaworld"}.items():
        if importlib.util.find_spec(module) is None:
            with pytest.raises(ValueError, match=rf"pip install .*\[{extra}\]'"):
                make_vector_env(EnvOptions(f"{module}:Any-v0", 1))
