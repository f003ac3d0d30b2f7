"""Flat observations taken apart and put together again."""

import numpy as np
import pytest
from gymnasium import spaces

from tether.envs.spaces.observation_layout import join, layout_of, split
from tether.envs.spaces.spaces import ActionCodec, flatten

SPACE = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (2, 3, 3), np.uint8),
        "robot": spaces.Dict({"joints": spaces.Box(-1, 1, (4,), np.float32), "mode": spaces.Discrete(3)}),
        "what": spaces.Text(12),
    }
)


def test_a_layout_names_every_stretch():
    image, joints, mode, task = layout_of(SPACE, "Odd-v0")
    assert (image.name, image.kind, image.shape, image.entries) == ("image", "image", (2, 3, 3), slice(0, 18))
    assert (joints.name, joints.kind, joints.entries) == ("robot.joints", "vector", slice(18, 22))
    assert (mode.name, mode.shape) == ("robot.mode", (3,))
    assert (task.name, task.kind, task.entries) == ("task", "text", slice(25, 37))
    (plain,) = layout_of(spaces.Box(0, 1, (2, 2), np.float32), "Odd-v0")
    assert (plain.name, plain.kind, plain.shape) == ("state", "vector", (4,))


def test_split_and_join_are_inverse():
    SPACE.seed(0)
    seen = [SPACE.sample() | {"what": text} for text in ("push", "größer", "")]
    rows = np.concatenate([flatten(SPACE, obs, 1) for obs in seen])
    layout = layout_of(SPACE, "Odd-v0")
    parts = split(layout, rows)
    assert parts["task"].tolist() == ["push", "größer", ""]
    assert parts["image"].dtype == np.uint8
    assert np.array_equal(parts["image"][1], seen[1]["image"])
    assert np.array_equal(join(layout, parts), rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts.pop("image"), r"image: the environment shows it, but here are only robot"),
        (lambda parts: parts.update(image=parts["image"][:, :1]), r"image: \(1, 3, 3\) here, but \(2, 3, 3\)"),
        (lambda parts: parts.update(task=np.array(["far too long a text"])), r"19 bytes, more than its space allows"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    layout = layout_of(SPACE, "Odd-v0")
    parts = split(layout, np.zeros((1, 37), dtype=np.float32))
    change(parts)
    with pytest.raises(ValueError, match=message):
        join(layout, parts)


def test_several_texts_are_refused():
    with pytest.raises(ValueError, match=r"Odd-v0: no policy reads several texts"):
        layout_of(spaces.Dict({"a": spaces.Text(3), "b": spaces.Text(3)}), "Odd-v0")


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
