"""Observations as named parts, and as episodes record them."""

import numpy as np
import pytest
from gymnasium import spaces

from tether.control.envs.conversion import ActionCodec, ObservationReader
from tether.observations import describe, played, recorded

SPACE = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (2, 3, 3), np.uint8),
        "robot": spaces.Dict({"joints": spaces.Box(-1, 1, (4,), np.float32), "mode": spaces.Discrete(3)}),
        "what": spaces.Text(12),
    }
)


def test_a_layout_names_every_part():
    image, joints, mode, task = ObservationReader(SPACE, "Odd-v0").layout
    assert (image.name, image.kind, image.shape, image.dtype) == ("image", "image", (2, 3, 3), "uint8")
    assert (joints.name, joints.kind, joints.shape, joints.dtype) == ("robot.joints", "vector", (4,), "float32")
    assert (mode.name, mode.shape, mode.choices, mode.dtype) == ("robot.mode", (1,), (3,), "int64")
    assert (task.name, task.kind, task.shape, task.dtype) == ("task", "text", (12,), "uint8")
    assert [part.width for part in (image, joints, mode, task)] == [18, 4, 3, 12]
    plain = ObservationReader(spaces.Box(0, 1, (2, 2), np.float32), "Odd-v0").layout
    assert describe(plain) == "state (4,)"


def seen(texts):
    """Observations of `SPACE` as they are sampled, and as parts."""
    SPACE.seed(0)
    read = ObservationReader(SPACE, "Odd-v0")
    sampled = [SPACE.sample() | {"what": text} for text in texts]
    rows = [read(obs, 1) for obs in sampled]
    return sampled, {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}, read.layout


def test_what_is_recorded_is_what_was_seen():
    sampled, parts, layout = seen(("push", "größer", ""))
    kept = recorded(layout, parts)
    assert kept["task"].tolist() == ["push", "größer", ""]
    assert np.array_equal(kept["image"][1], sampled[1]["image"])
    assert {name: part.dtype.kind for name, part in kept.items()} == {
        "image": "u", "robot.joints": "f", "robot.mode": "i", "task": "U",
    }  # fmt: skip
    again = played(layout, kept)
    assert again.keys() == parts.keys()
    for name, part in parts.items():
        assert again[name].dtype == part.dtype
        assert np.array_equal(again[name], part)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts.pop("image"), r"image: the environment shows it, but here are only robot"),
        (lambda parts: parts.update(image=parts["image"][:, :1]), r"image: \(1, 3, 3\) here, but \(2, 3, 3\)"),
        (lambda parts: parts.update(image=parts["image"] / 255), r"image: float64 here, but uint8 in the environment"),
        (lambda parts: parts.update(task=np.array(["far too long a text"])), r"19 bytes, more than its space allows"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    _, parts, layout = seen(("",))
    kept = recorded(layout, parts)
    change(kept)
    with pytest.raises(ValueError, match=message):
        played(layout, kept)


def test_several_texts_are_refused():
    with pytest.raises(ValueError, match=r"Odd-v0: no policy reads several texts"):
        ObservationReader(spaces.Dict({"a": spaces.Text(3), "b": spaces.Text(3)}), "Odd-v0")


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4, start=2),
        spaces.MultiDiscrete([3, 2]),
        spaces.MultiBinary(3),
        spaces.Box(-1, 1, (2, 2), np.float32),
    ],
)
def test_actions_are_encoded_as_they_are_decoded(space):
    codec = ActionCodec.of(space, "Odd-v0")
    space.seed(1)
    for _ in range(10):
        action = space.sample()
        row = codec.encode(action)
        assert row.shape == (codec.spec.width,)
        assert np.array_equal(codec.decode(row[None])[0], action)
    with pytest.raises(ValueError, match=r"Odd-v0: an action of shape \(7,\)"):
        codec.encode(np.zeros(7))
