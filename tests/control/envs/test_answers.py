"""Observations, rewards and flags of an environment's step: read exactly, or refused by environment and value."""

import gymnasium
import numpy as np
import pytest

from tether.control.envs.loop import SyncVectorEnv


class Answers(gymnasium.Env):
    """Gives `answer` to every step, with a fresh observation where it holds None."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, space, first, answer):
        self.observation_space, self.first, self.answer = space, first, answer

    def reset(self, *, seed=None, options=None):
        return self.first, {}

    def step(self, action):
        return self.answer


BOX = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
OBS = np.zeros(3, np.float32)


def step(answer, space=BOX, first=OBS):
    env = SyncVectorEnv("mine", lambda: Answers(space, first, answer), 2)
    env.reset(0)
    return env.step(np.zeros((2, 1), dtype=np.int64))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((OBS, 1.0, True, {}), "4 values, not the five"),
        (None, "a step gives None (NoneType)"),
        ((OBS, "1", False, False, {}), "the reward is '1' (str), no number"),
        ((OBS, None, False, False, {}), "the reward is None (NoneType)"),
        ((OBS, np.ones(2), False, False, {}), "the reward is array([1., 1.]) (ndarray of shape (2,))"),
        ((OBS, 1j, False, False, {}), "the reward is 1j (complex)"),
        ((OBS, 1.0, "no", False, {}), "`terminated` is 'no' (str)"),
        ((OBS, 1.0, False, None, {}), "`truncated` is None"),
        ((OBS, 1.0, np.array([True, False]), False, {}), "`terminated` is array([ True, False])"),
        ((OBS, 1.0, False, False, [1]), "the info of a step is [1] (list)"),
        ((np.zeros(4, np.float32), 1.0, False, False, {}), "of shape (4,)) is not in Box(-1.0, 1.0, (3,), float32)"),
        ((np.zeros((1, 3), np.float32), 1.0, False, False, {}), "of shape (1, 3)) is not in Box"),
        ((np.float32(0), 1.0, False, False, {}), "is not in Box"),
        ((None, 1.0, False, False, {}), "the observation None (NoneType) is not in Box"),
        (({"a": OBS}, 1.0, False, False, {}), "is not in Box"),
        (("abc", 1.0, False, False, {}), "the observation 'abc' (str) is not in Box"),
    ],
)
def test_what_cannot_be_read_is_refused_by_environment_and_value(answer, words):
    with pytest.raises(ValueError, match="mine, environment 0: ") as refused:
        step(answer)
    assert words in str(refused.value)
    assert "Correct the environment" in str(refused.value)


@pytest.mark.parametrize(
    "answer",
    [
        (OBS, True, 0, np.bool_(True), {}),
        (OBS.astype(np.float64), np.array(1), np.array(False), 1, None),
        ([0.0, 0.0, 0.0], np.int64(1), False, True, {}),
        [OBS, np.float16(1), False, True, {}],
    ],
)
def test_numbers_and_flags_of_other_types_are_read(answer):
    read = step(answer)
    assert read.reward.tolist() == [1, 1]
    assert (read.terminated.any(), read.truncated.all()) == (False, True)


def test_parts_that_do_not_fit_are_refused():
    space = gymnasium.spaces.Dict({"a": BOX, "b": gymnasium.spaces.Discrete(3)})
    with pytest.raises(ValueError, match=r"mine, environment 0: the observation .* is not in Dict"):
        step(({"a": OBS}, 1.0, False, False, {}), space, {"a": OBS, "b": 1})
    with pytest.raises(ValueError, match=r"mine, environment 0: the observation .* is not in Dict"):
        step(({"a": np.zeros(2), "b": 1}, 1.0, False, False, {}), space, {"a": OBS, "b": 1})


@pytest.mark.parametrize(
    ("space", "first", "bad"),
    [
        (gymnasium.spaces.Discrete(3), 0, 3),
        (gymnasium.spaces.Discrete(3, start=1), 1, 0),
        (gymnasium.spaces.Discrete(3), 0, 1.5),
        (gymnasium.spaces.MultiDiscrete([2, 3]), np.zeros(2, np.int64), np.array([2, 0])),
        (gymnasium.spaces.MultiBinary(2), np.zeros(2, np.int8), np.array([0.5, 0.0])),
        (gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8), np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 0.5)),
        (gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8), np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 256)),
        (gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8), np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), np.nan)),
    ],
)
def test_integers_are_not_cut_to_fit(space, first, bad):
    step((first, 1.0, False, False, {}), space, first)
    step((np.asarray(first, np.float64), 1.0, False, False, {}), space, first)  # whole numbers of another type
    with pytest.raises(ValueError, match=r"mine, environment 0: the observation .* is not in"):
        step((bad, 1.0, False, False, {}), space, first)


def test_numbers_are_not_mixed_up_to_fit():
    pairs, obs = gymnasium.spaces.Box(-1, 1, (2, 3), np.float32), np.zeros((2, 3), np.float32)
    for bad in (obs.T, obs.reshape(6), obs + 1j):
        with pytest.raises(ValueError, match=r"mine, environment 0: the observation .* is not in Box.*\(2, 3\)"):
            step((bad, 1.0, False, False, {}), pairs, obs)


class ResetsInTheOldWay(Answers):
    """Gives the observation alone, except the first time."""

    def reset(self, *, seed=None, options=None):
        self.first, obs = None, self.first
        return OBS if obs is None else (obs, {})


def test_a_reset_in_the_old_way_is_refused_by_environment():
    env = SyncVectorEnv("mine", lambda: ResetsInTheOldWay(BOX, OBS, (OBS, 1.0, True, False, {})), 1)
    env.reset(0)
    for again in (lambda: env.reset(0), lambda: env.step(np.zeros((1, 1), dtype=np.int64))):
        with pytest.raises(ValueError, match=r"mine, environment 0: a reset gives array.* not the two of Gymnasium"):
            again()
