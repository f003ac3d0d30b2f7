"""Spaces as rows of numbers, and rows of an action as what a space takes."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tether.control.envs.conversion import ActionCodec, ObservationReader
from tether.control.envs.protocol import ContinuousActions, DiscreteActions
from tether.control.policies.networks import as_tensors
from tether.control.policies.spec import FlatRow
from tether.observations import row_width

NESTED = spaces.Dict(
    {"goal": spaces.Discrete(3, start=1), "state": spaces.Box(-1, 1, (2, 2), np.float64), "bits": spaces.MultiBinary(2)}
)


def test_observations_by_hand():
    obs = {"goal": 2, "state": np.array([[0.1, 0.2], [0.3, 0.4]]), "bits": np.array([1, 0], dtype=np.int8)}
    parts = ObservationReader(NESTED, "x")(obs, 1)
    assert list(parts) == list(NESTED.spaces)  # Gymnasium sorts a dict's keys
    assert {name: part.dtype for name, part in parts.items()} == {"goal": "i8", "state": "f4", "bits": "i1"}
    assert parts["goal"].tolist() == [[1]]
    assert parts["bits"].tolist() == [[1, 0]]
    np.testing.assert_allclose(parts["state"], [[0.1, 0.2, 0.3, 0.4]], rtol=1e-6)


@pytest.mark.parametrize(
    "space", [NESTED, spaces.MultiDiscrete([2, 3]), spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (3,))))]
)
def test_a_flat_row_is_as_gymnasium_flattens(space):
    space.seed(0)
    sample, read = space.sample(), ObservationReader(space, "x")
    row = FlatRow(read.layout)(as_tensors(read(sample, 1)))
    np.testing.assert_allclose(row[0], spaces.flatten(space, sample), rtol=1e-6)
    assert row.shape == (1, row_width(read.layout))


def test_a_batch_is_its_rows():
    space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(0, 1, (2,), np.float32)})
    batch = {"a": np.array([0, 2]), "b": np.array([[0.1, 0.2], [0.3, 0.4]], dtype=np.float32)}
    parts = ObservationReader(space, "x")(batch, 2)
    assert parts["a"].tolist() == [[0], [2]]
    assert np.array_equal(parts["b"], batch["b"])


@pytest.mark.parametrize(
    ("space", "dtype"),
    [
        (spaces.Box(0, 255, (4, 4, 3), np.uint8), "uint8"),
        (spaces.Box(0, 255, (128,), np.uint8), "uint8"),
        (spaces.Box(-5, 5, (2,), np.int16), "int16"),
        (spaces.Box(-1, 1, (2,), np.float64), "float32"),
        (spaces.MultiBinary(3), "int8"),
        (spaces.Text(5), "uint8"),
    ],
)
def test_every_part_keeps_its_type_but_floats_which_networks_compute_in(space, dtype):
    read = ObservationReader(space, "x")
    (part,) = read.layout
    space.seed(0)
    assert part.dtype == dtype
    assert read(space.sample(), 1)[part.name].dtype == read.zeros(1)[part.name].dtype == dtype


def test_actions_by_hand():
    codec = ActionCodec.of(spaces.Discrete(3, start=5), "x")
    assert codec.spec == DiscreteActions((3,))
    assert codec.decode(np.array([[0], [2]])).tolist() == [5, 7]
    codec = ActionCodec.of(spaces.MultiBinary(2), "x")
    assert codec.spec == DiscreteActions((2, 2))
    assert codec.decode(np.array([[0, 1]])).dtype == np.int8
    codec = ActionCodec.of(spaces.Box(np.array([[-1.0, 0.0]]), np.array([[1.0, 2.0]]), dtype=np.float64), "x")
    assert codec.spec == ContinuousActions(2)
    assert codec.decode(np.array([[-3, 3]], dtype=np.float32)).tolist() == [[[-1.0, 2.0]]]


@pytest.mark.parametrize(
    "space", [spaces.Sequence(spaces.Discrete(2)), spaces.Dict({"a": spaces.Graph(spaces.Discrete(2), None)})]
)
def test_an_observation_that_is_no_number(space):
    with pytest.raises(ValueError, match=r"Odd-v0: no policy reads the observation space"):
        ObservationReader(space, "Odd-v0")


@pytest.mark.parametrize("space", [spaces.Box(0, 5, (2,), np.int64), spaces.Dict({"a": spaces.Text(3)})])
def test_an_action_that_no_policy_takes(space):
    with pytest.raises(ValueError, match=r"Odd-v0: no policy acts in the action space"):
        ActionCodec.of(space, "Odd-v0")


def test_decoded_actions_lie_in_their_space():
    for space in (
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([2, 3], start=[1, 1]),
        gymnasium.spaces.Box(-2, 2),
    ):
        codec = ActionCodec.of(space, "x")
        action = codec.decode(np.full((1, codec.spec.width), 1))[0]
        assert space.contains(action), action
