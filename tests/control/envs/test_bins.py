"""Actions as bins: the round trip, the ends of the range, environments that take them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.control.envs import toys
from tether.control.envs.layers import ActionCodeEnv
from tether.control.envs.make import EnvOptions, make_vector_env
from tether.integrations.robots.action_bins import CENTERS, NUM_INDICES, ActionBins, check_bounds

BINS = ActionBins((-1.0, 0.0, 5.0), (1.0, 0.5, 5.0))


def test_by_hand():
    assert len(CENTERS) == 255
    assert CENTERS[127] == pytest.approx(0, abs=1e-12)
    assert BINS.decode(np.array([[127, 127, 3]])) == pytest.approx(np.array([[0.0, 0.25, 5.0]]), abs=1e-7)
    # 0.5 * (-254/255 + 1) * 0.5 is a quarter of 1/255.
    assert BINS.decode(np.array([0, 0, 0]))[1] == pytest.approx(0.25 / 255)
    assert np.array_equal(BINS.decode(np.array([254, 254, 254])), BINS.decode(np.array([255, 255, 255])))
    assert BINS.encode(np.array([9.0, -9.0, 5.0], dtype=np.float32)).tolist() == [254, 0, 0]


@given(st.lists(st.integers(0, NUM_INDICES - 2), min_size=2, max_size=2))
def test_a_bin_comes_back(numbers):
    bins = ActionBins((-1.0, 0.0), (1.0, 0.5))
    assert bins.encode(bins.decode(np.array(numbers))).tolist() == numbers


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5))
def test_an_action_comes_back_within_half_a_bin(values):
    actions = np.array([[2 * value, value] for value in values], dtype=np.float32)
    bins = ActionBins((-2.0, -1.0), (2.0, 1.0))
    error = np.abs(bins.decode(bins.encode(actions)) - actions)
    assert (error <= np.array([2.0, 1.0]) / 255 + 1e-6).all()


def test_ranges_of_data():
    actions = np.stack([np.linspace(0, 1, 101), np.full(101, 3.0)], axis=1).astype(np.float32)
    assert ActionBins.of_data(actions, (0, 1)) == ActionBins((0.0, 3.0), (1.0, 3.0))
    assert ActionBins.of_data(actions, (0.01, 0.99)).low[0] == pytest.approx(0.01)
    assert np.isfinite(ActionBins.of_data(actions, (0, 1)).decode(np.array([[7, 7]]))).all()


def test_environments_take_bins():
    toys.register()
    env = ActionCodeEnv(make_vector_env(EnvOptions("tether/Identity-box-v0", 3)), ActionBins((-1.0, -1.0), (1.0, 1.0)))
    assert env.actions.choices == (256, 256)
    target = env.reset(0)["state"].copy()
    step = env.step(ActionBins((-1.0, -1.0), (1.0, 1.0)).encode(target))
    assert step.reward.min() > 1 - 1 / 255
    env.close()


def test_a_range_without_an_end_is_refused():
    assert check_bounds("Odd-v0", [0.0], [1.0]) == ActionBins((0.0,), (1.0,))
    with pytest.raises(ValueError, match=r"Odd-v0: column 1 of its actions reaches from -inf to 1"):
        check_bounds("Odd-v0", [0.0, -np.inf], [1.0, 1.0])
