"""What a vector environment gives is read exactly, or refused by its name, as what a single environment gives."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from tether.control.envs.gymnasium_vector import GymnasiumVectorEnv

ENVS = 8
PAIRS = gymnasium.spaces.Box(-1, 1, (2, 3), np.float32)
CODES = gymnasium.spaces.Box(-10, 10, (3,), np.int64)


class Fives(VectorEnv):
    """Episodes of five steps; the reward of a step is 1, and 100 in the step that only resets.

    Args:
        change: name of a value -> function of what is right.
        space: of an observation.
        mode: of the automatic reset.
    """

    def __init__(
        self,
        change: dict[str, Any] | None = None,
        space: gymnasium.Space[Any] = PAIRS,
        mode: object = AutoresetMode.NEXT_STEP,
    ) -> None:
        self.num_envs, self.metadata, self._change = ENVS, {"autoreset_mode": mode}, change or {}
        self.single_observation_space, self.single_action_space = space, gymnasium.spaces.Discrete(2)
        self.observation_space = batch_space(space, ENVS)
        self.action_space = batch_space(self.single_action_space, ENVS)

    def _changed(self, **values: Any) -> tuple[Any, ...]:
        return tuple(self._change.get(name, lambda value: value)(value) for name, value in values.items())

    def _obs(self) -> Any:
        return np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._t, self._ended = np.arange(ENVS) % 5, np.zeros(ENVS, np.bool_)
        return self._change.get("begun", lambda value: value)(self._changed(first=self._obs(), info={}))

    def step(self, actions: Any) -> Any:
        self._t = np.where(self._ended, 0, self._t + 1)
        reward, never = np.where(self._ended, 100.0, 1.0), np.zeros(ENVS, np.bool_)
        self._ended = self._t >= 5
        stepped = self._changed(obs=self._obs(), reward=reward, terminated=self._ended, truncated=never, infos={})
        return self._change.get("stepped", lambda value: value)(stepped)


def play(steps: int = 12, **options: Any) -> list[float]:
    """Rewards of the valid steps of all environments."""
    env = GymnasiumVectorEnv("mine", Fives(**options))
    env.reset(0)
    rewards = list[float]()
    for _ in range(steps):
        step = env.step(np.zeros((ENVS, 1), np.int64))
        rewards += step.reward[slice(None) if step.valid is None else step.valid].tolist()
    return rewards


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
def test_flags_and_rewards_of_other_types_mean_the_same(dtype: Any) -> None:
    def cast(value: Any) -> Any:
        return value.astype(dtype)

    assert play(change={"terminated": cast, "truncated": cast, "reward": cast}) == play()
    assert set(play()) == {1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"obs": lambda obs: obs.swapaxes(1, 2)}, "the observations array("),
        ({"obs": lambda obs: obs.reshape(ENVS, 6)}, "(ndarray of shape (8, 6)) are not 8 rows of Box"),
        ({"obs": lambda obs: obs[:, :1]}, "(ndarray of shape (8, 1, 3)) are not 8 rows of Box"),
        ({"obs": lambda obs: obs[:4]}, "(ndarray of shape (4, 2, 3)) are not 8 rows of Box"),
        ({"obs": lambda obs: obs + 1j}, "complex64 is not a number"),
        ({"obs": lambda obs: None}, "the observations None (NoneType) are not 8 rows of Box"),
        ({"first": lambda obs: obs[0]}, "(ndarray of shape (2, 3)) are not 8 rows of Box"),
        ({"begun": lambda begun: begun[0]}, "a reset gives array("),
        ({"begun": lambda begun: (*begun, {})}, "a reset gives 3 values, not the two of Gymnasium"),
        ({"info": lambda info: [info]}, "the info of a reset is [{}] (list), no dict"),
        ({"stepped": lambda step: step[:4]}, "a step gives 4 values, not the five"),
        ({"infos": lambda infos: [infos] * ENVS}, "the info of a step is [{}, {},"),
        ({"reward": lambda reward: reward[:, None]}, "the reward is array("),
        ({"reward": lambda reward: reward[0]}, "not a number for each of 8 environments"),
        ({"terminated": lambda flags: flags + 0.5}, "neither True nor False"),
        ({"truncated": lambda flags: False}, "`truncated` is False (bool), not one flag for each of 8"),
        ({"terminated": lambda flags: ~flags & False | True}, "environment 0 ends again in the step that resets it"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^mine") as refused:
        play(change=change)
    assert words in str(refused.value)
    assert "Correct the environment" in str(refused.value)


def test_integers_are_not_cut_to_fit() -> None:
    assert play(change={"obs": lambda obs: obs + 2.0}, space=CODES)  # whole numbers of another type
    with pytest.raises(ValueError, match=r"mine: the observations .* are not 8 rows of Box.* int64 cannot hold"):
        play(change={"obs": lambda obs: obs + 0.5}, space=CODES)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (None, "is None (NoneType); expected an observation of Box"),
        (np.zeros((2, 2, 3)), "for environment 4, whose episode ended (index 4 is out of bounds"),
        (np.zeros((ENVS, 2)), "(state has the shape (2,), not (1, 2, 3))"),
        ([None] * ENVS, "(state has the shape (), not (1, 2, 3))"),
        ({"state": np.zeros((ENVS, 2, 3))}, "is {'state': array("),
    ],
)
def test_last_observations_that_do_not_fit_are_refused_by_name(last: object, words: str) -> None:
    change = {"infos": lambda infos: {"final_obs": last}}
    with pytest.raises(ValueError, match=r"(?s)^mine: info\['final_obs'\] is .*Correct the environment") as refused:
        play(change=change, mode=AutoresetMode.SAME_STEP)
    assert words in str(refused.value)


def test_a_mode_that_does_not_exist_and_a_missing_last_observation_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mine: its metadata\['autoreset_mode'\] is 'sometimes'"):
        play(mode="sometimes")
    with pytest.raises(ValueError, match=r"mine: .*SAME_STEP.* info\['final_obs'\] .*missing"):
        play(mode=AutoresetMode.SAME_STEP)
