"""Simulators that are extras: each gives what a policy can read, where it is installed."""

import importlib
from importlib.metadata import version

import numpy as np
import pytest

from tests.trainer.tiny_run import measured
from tether.config import load_config
from tether.envs.make import EnvOptions, make_vector_env
from tether.envs.protocol import ContinuousActions, DiscreteActions
from tether.trainer.build.control import build_control_run

FETCH = EnvOptions("gymnasium_robotics:FetchReach-v4", 1, max_episode_steps=10)
PICTURE = EnvOptions(
    "minigrid:MiniGrid-Empty-5x5-v0", 2, max_episode_steps=10, wrappers=("minigrid.wrappers:ImgObsWrapper",)
)
REACH = EnvOptions("metaworld:Meta-World/MT1", 2, max_episode_steps=10, init_params={"env_name": "reach-v3", "seed": 1})
CASES = {  # 7 x 7 cells of a partial view, three numbers each; position, goal and state of the arm
    "minigrid": (PICTURE, 147, DiscreteActions((7,))),
    "gymnasium_robotics": (FETCH, 16, ContinuousActions(4)),
    "metaworld": (REACH, 39, ContinuousActions(4)),
}


@pytest.mark.parametrize("module", CASES)
def test_a_simulator_is_stepped_and_learned_from(module, tmp_path):
    pytest.importorskip(module)
    if module == "gymnasium_robotics" and int(version("mujoco").split(".")[0]) >= 4:
        pytest.skip("gymnasium-robotics 1.4 does not know the joints of mujoco 4")
    options, obs_dim, actions = CASES[module]
    env = make_vector_env(options)
    assert (env.obs_dim, env.actions) == (obs_dim, actions)
    obs = env.reset(0).copy()
    assert np.array_equal(obs, env.reset(0))  # equal seeds, equal starts
    assert options.num_envs == 1 or module == "minigrid" or not np.array_equal(obs[0], obs[1])
    whole = isinstance(actions, DiscreteActions)
    chosen = np.full((options.num_envs, actions.width), 2 if whole else 0.5, dtype=np.int64 if whole else np.float32)
    steps = [env.step(chosen) for _ in range(10)]
    assert steps[-1].truncated.all()
    assert (steps[-1].success is not None) == (not whole)
    env.close()
    wrappers = ",".join(options.wrappers)
    run = build_control_run(
        load_config(
            None,
            [
                f"env.train.id={options.id}", "env.train.total_num_envs=2", "env.train.max_episode_steps=10",
                *[f"env.train.init_params.{key}={value}" for key, value in options.init_params.items()],
                f"env.train.wrappers=[{wrappers}]", "env.train.max_steps_per_rollout_epoch=20",
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
    assert ("eval/success_once" in last) == (not whole)


def test_a_missing_simulator_says_what_to_install():
    for module, extra in {"minigrid": "minigrid", "metaworld": "metaworld"}.items():
        if importlib.util.find_spec(module) is None:
            with pytest.raises(ValueError, match=rf"pip install 'tether\[{extra}\]'"):
                make_vector_env(EnvOptions(f"{module}:Any-v0", 1))
