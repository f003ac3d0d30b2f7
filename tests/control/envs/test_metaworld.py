"""MetaWorld: its scripted policies, repeated actions, and what a camera sees. Runs where MetaWorld is installed."""

import os

import numpy as np
import pytest

pytest.importorskip("metaworld")

import gymnasium

from tests.runs.control_run import call
from tether.control.envs.make import EnvOptions, make_one, make_vector_env, scripted
from tether.integrations.rlinf.robot_simulators import ARGUMENTS
from tether.integrations.robots.lerobot import read_dataset
from tether.integrations.robots.metaworld import SUITES
from tether.integrations.robots.metaworld_sentences import SENTENCES

CAMERA = {"lookat": [0.0, 0.7, 0.1], "distance": 0.75, "azimuth": 240.0, "elevation": -45.0}
draws = pytest.mark.skipif("MUJOCO_GL" not in os.environ, reason="pictures are drawn with MUJOCO_GL=egl or osmesa")


def options(task, steps, **arguments):
    return EnvOptions(task, 2, env_type="metaworld", max_episode_steps=steps, init_params=arguments)


def played(given, seed=3):
    """The steps of an episode as the scripted policy plays it."""
    env, act = make_one(given), scripted(given)
    obs, _ = env.reset(seed=seed)
    steps = []
    while not steps or not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step(act(env, obs)))
        obs = steps[-1][0]
    env.close()
    return steps


@pytest.mark.parametrize("task", ["reach-v3", "push-v3", "pick-place-v3"])
def test_scripted_policies_solve_their_tasks(task):
    assert any(info["success"] for *_, info in played(options(task, 100)))


def test_the_scripted_policy_of_a_suite_is_that_of_the_episode():
    given = options("MT10", 150)
    env, act = make_one(given), scripted(given)
    for seed in (1, 2, 3):
        obs, _ = env.reset(seed=seed)
        solved = False
        for _ in range(150):
            obs, *_, info = env.step(act(env, obs))
            solved = solved or bool(info["success"])
        assert solved, env.unwrapped.task


def test_repeated_actions_make_short_episodes():
    steps = played(options("reach-v3", 20, action_repeat=5))
    assert len(steps) == 20
    assert any(info["success"] for *_, info in steps)
    assert max(reward for _, reward, *_ in steps) > 10  # which is the most that a step of MetaWorld pays


def test_success_pays_once_and_ends_the_episode_where_that_is_asked_for():
    given = {"reward": "success", "terminate_on_success": True, "action_repeat": 5}
    steps = played(options("reach-v3", 20, **given))
    assert [reward for _, reward, *_ in steps] == [0.0] * (len(steps) - 1) + [1.0]
    _, _, terminated, truncated, info = steps[-1]
    assert (terminated, truncated, bool(info["success"])) == (True, False, True)


def test_success_pays_in_each_step_that_solves_the_task():
    steps = played(options("reach-v3", 60, reward="success"))
    assert {reward for _, reward, *_ in steps} == {0.0, 1.0}
    assert all(reward == info["success"] for _, reward, _, _, info in steps)


def test_a_reward_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"init_params\.reward is 'sparse'\. Use dense or success\."):
        make_one(options("reach-v3", 5, reward="sparse"))


@draws
def test_a_camera_shows_the_goal_and_hides_its_numbers():
    env = make_vector_env(options("reach-v3", 5, camera=CAMERA, picture_size=32))
    parts = [(part.name, part.kind, part.shape) for part in env.layout]
    assert parts == [("image", "image", (32, 32, 3)), ("state", "vector", (4,)), ("task", "text", (5,))]
    pictures = env.reset(0)["image"].astype(int)
    changed = np.argwhere((pictures[0] != pictures[1]).any(axis=-1))
    assert 0 < len(changed) < 60  # only the goal and the object lie elsewhere
    assert (pictures[0][tuple(changed.T)][:, 0] > 200).any()  # the goal is red
    env.close()


RLINFS = ARGUMENTS["metaworld"]


def test_idle_steps_do_not_count_and_suites_are_metaworlds():
    blind = {name: RLINFS[name] for name in ("settling_steps", "reward", "terminate_on_success")}
    env = make_one(options("button-press-v3", 7, **blind))
    env.reset(seed=0)
    moved = [env.step(np.zeros(4, np.float32)) for _ in range(7)]
    assert [truncated for *_, truncated, _ in moved] == [False] * 6 + [True]
    assert (len(SUITES["ML45-train"]), len(SUITES["ML45-test"])) == (45, 5)
    assert {*SUITES["ML45-train"], *SUITES["ML45-test"]} == set(SUITES["MT50"]) == set(SENTENCES)


@draws
def test_pictures_are_those_that_rlinf_renders():
    """RLinf moves Gymnasium's camera 2 and turns what it renders."""
    env = make_one(options("reach-v3", 5, **RLINFS))
    obs, _ = env.reset(seed=0)
    assert obs["task"] == "Reach a goal position"
    given = {"render_mode": "rgb_array", "camera_id": 2, "disable_env_checker": True}
    theirs = gymnasium.make("Meta-World/MT1", env_name="reach-v3", **given).unwrapped
    mine = env.unwrapped.simulator
    theirs.model.cam_pos[2] = RLINFS["camera_position"]
    for name in ("site_pos", "body_pos"):
        getattr(theirs.model, name)[:] = getattr(mine.model, name)
    for name in ("qpos", "qvel", "mocap_pos", "mocap_quat"):
        getattr(theirs.data, name)[:] = getattr(mine.data, name)
    pytest.importorskip("mujoco").mj_forward(theirs.model, theirs.data)
    assert np.array_equal(obs["image"], theirs.render()[::-1, ::-1])
    theirs.close()
    env.close()


@draws
def test_episodes_of_the_scripted_policy_are_recorded_as_the_camera_saw_them(tmp_path):
    keys = [
        "env.train.env_type=metaworld", "env.train.id=pick-place-v3", "env.train.max_episode_steps=4",
        "env.train.init_params.camera=corner2", "env.train.init_params.picture_size=16", "policy.model_type=openvla",
    ]  # fmt: skip
    call("collect", *keys, "--from", "scripted", "-o", tmp_path / "demos", "-n", 2)
    first, second = read_dataset(tmp_path / "demos")
    assert first.observations["image"].shape == (4, 16, 16, 3)
    assert first.observations["state"].shape == (4, 4)
    assert list(first.observations["task"]) == ["pick place"] * 4
    assert first.actions.shape == (4, 4)
    assert not np.array_equal(first.actions, second.actions)  # other goals


@draws
@pytest.mark.parametrize(
    ("camera", "message"),
    [
        ("nowhere", r"init_params\.camera: MetaWorld has no camera nowhere\. Use one of topview"),
        ({"zoom": 2}, r"init_params\.camera: a camera has no zoom\. Use lookat, distance"),
    ],
)
def test_cameras_that_there_are_not_are_refused(camera, message):
    with pytest.raises(ValueError, match=message):
        make_one(options("reach-v3", 5, camera=camera))
