"""Vector code is taken where it is the game of a single environment, and what is tested has its rewards as they are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from tests.control.envs.test_vector_answers import Fives
from tether.config import load_config
from tether.control.build import make_env, observation_fields, reset_policy_fields
from tether.control.envs.gymnasium_vector import GymnasiumVectorEnv
from tether.control.envs.loop import SyncVectorEnv
from tether.control.envs.make import EnvOptions, describe_preprocessing, make_vector_env, spaces_of

ID, STILL = "tests/SameGame-v0", np.zeros((8, 1), np.int64)


class Single(gymnasium.Env):
    """Its rewards are 5."""

    observation_space, action_space = Box(-1, 1, (2, 3), np.float32), Discrete(2)

    def __init__(self, skip: int = 1, reward_clip: bool = False, render_mode: str | None = None) -> None:
        self.skip = skip

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros((2, 3), np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros((2, 3), np.float32), 5.0, False, False, {}


class Same(Fives):
    """The rewards of the single environment, unless they are clipped."""

    def __init__(self, num_envs: int, skip: int = 1, reward_clip: bool = False, **options: Any) -> None:
        super().__init__({"reward": lambda reward: reward.clip(-1, 1) if reward_clip else reward * 0 + 5}, **options)


class OtherPictures(Same):
    def __init__(self, num_envs: int, skip: int = 1) -> None:
        super().__init__(num_envs, skip, space=Box(-1, 1, (6,), np.float32))


class OtherRewards(Same):
    def __init__(self, num_envs: int, skip: int = 1, reward_clipping: bool = True) -> None:
        super().__init__(num_envs, skip, reward_clipping)


class OtherOptions(Same):
    def __init__(self, num_envs: int, skip: int = 4) -> None:
        super().__init__(num_envs, skip)


@pytest.fixture(autouse=True)
def _unregistered() -> Iterator[None]:
    yield
    gymnasium.registry.pop(ID, None)


def made(vector_code: type, **options: Any) -> Any:
    gymnasium.registry.pop(ID, None)
    gymnasium.register(ID, entry_point=Single, vector_entry_point=vector_code)
    env: Any = make_vector_env(EnvOptions(ID, 8, **options))
    env.reset(0)
    return env._env


@pytest.mark.parametrize(
    ("vector_code", "is_taken"), [(Same, True), (OtherPictures, False), (OtherRewards, False), (OtherOptions, False)]
)
def test_vector_code_of_another_game_is_taken_on_demand_alone(vector_code: type, is_taken: bool) -> None:
    assert isinstance(made(vector_code), GymnasiumVectorEnv if is_taken else SyncVectorEnv)
    assert isinstance(made(vector_code, vectorization="vector"), GymnasiumVectorEnv)


def test_the_same_options_may_be_given() -> None:
    assert isinstance(made(OtherOptions, init_params={"skip": 4}), GymnasiumVectorEnv)


def test_what_is_loaded_has_the_spaces_of_the_vector_code_that_was_demanded() -> None:
    gymnasium.register(ID, entry_point=Single, vector_entry_point=OtherPictures)
    assert [spaces_of(EnvOptions(ID, 8, vectorization=how))[0].shape for how in ("auto", "vector")] == [(2, 3), (6,)]


CLIP = "gymnasium.wrappers:ClipReward?min_reward=-1&max_reward=1"


@pytest.mark.parametrize(
    ("vector_code", "options"),
    [
        (OtherRewards, {"vectorization": "vector"}),
        (Same, {"vectorization": "vector", "init_params": {"reward_clip": True}}),
        (Same, {"vectorization": "sync", "wrappers": (CLIP,)}),
    ],
)
def test_rewards_are_clipped_where_the_policy_learns_and_not_where_it_is_tested(
    vector_code: type, options: dict[str, Any]
) -> None:
    rewards = [made(vector_code, role=role, **options).step(STILL).reward for role in ("env.train", "env.eval")]
    assert [set(of.tolist()) for of in rewards] == [{1}, {5}]


def test_the_preprocessing_is_described() -> None:
    gymnasium.register(ID, entry_point=Single)
    repeat = "gymnasium.wrappers:RepeatAction?n=4"
    options = EnvOptions(ID, 1, init_params={"skip": 2}, wrappers=(repeat, CLIP), role="env.eval")
    assert describe_preprocessing(options) == f"skip=2, {repeat}, rewards as they are (without {CLIP})"
    assert describe_preprocessing(EnvOptions(ID, 1, role="env.eval")) == "none, rewards as they are"


def test_atari_is_the_same_game_for_any_number_of_environments() -> None:
    pytest.importorskip("ale_py")
    for count in (1, 8):
        env: Any = make_vector_env(EnvOptions("ale_py:ALE/Pong-v5", count))
        assert env.layout[0].shape == (210, 160, 3)
        env.close()


RECIPE = Path(__file__).resolve().parents[3] / "recipes/atari"


def recipe_env(name: str, role: str) -> Any:
    config = load_config(RECIPE / name, ["env.train.total_num_envs=2"]).config
    section = config.env.train if role == "env.train" else config.env.eval
    return make_env(
        section, role, reset_policy_fields(config.env.train, config.policy), observation_fields(config.env.train)
    )


def test_the_recipe_of_atari_shows_the_same_from_wrappers_and_from_envpool() -> None:
    for package in ("ale_py", "cv2", "envpool"):
        pytest.importorskip(package)
    seen = {}
    for name in ("run.yaml", "envpool.yaml"):
        env = recipe_env(name, "env.train")
        pictures = env.reset(1)["image"]
        seen[name] = env.layout, env.actions, pictures.mean()
        env.close()
    (*wrapped, grey), (*pooled, as_grey) = seen.values()
    assert wrapped == pooled
    assert abs(grey - as_grey) < 10  # of 255


def test_the_recipe_of_atari_clips_where_it_learns_alone() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    layers = {}
    for role in ("env.train", "env.eval"):
        env, names = recipe_env("run.yaml", role), list[str]()
        layer = env._env._envs[0]
        while isinstance(layer, gymnasium.Wrapper):
            names.append(type(layer).__name__)
            layer = layer.env
        layers[role] = names
        env.close()
    assert [name for name in layers["env.train"] if name != "ClipReward"] == layers["env.eval"]
    assert "ClipReward" in layers["env.train"]
    assert "AtariPreprocessing" in layers["env.eval"]
