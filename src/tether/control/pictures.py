"""The pictures and texts in an environment's observations, as control policies support them."""

from __future__ import annotations

from tether.control.envs import VectorEnv
from tether.control.policies import SMALLEST
from tether.observations import describe


def find_pictures(env: VectorEnv, model_type: str) -> tuple[str, ...]:
    """Return ``PolicySpec.pictures``: the names of the pictures in an observation.

    Raises:
        ValueError: there are no pictures, or their sizes differ.
    """
    pictures = [entry for entry in env.layout if entry.kind == "image"]
    if len({entry.shape[:2] for entry in pictures}) != 1:
        what = "pictures of different sizes" if pictures else "no picture of bytes"
        raise ValueError(
            f"policy.model_type={model_type}: {env.id} shows {what} ({describe(env.layout)}). Use mlp_policy, or leave "
            "a part out with env.train.drop_observations."
        )
    return tuple(entry.name for entry in pictures)


def fitting_cnn(cnn_type: str, env: VectorEnv, pictures: tuple[str, ...]) -> str:
    """Return the ``PolicySpec.cnn_type`` for pictures: the configured one, or for ``auto`` one that fits their size.

    Raises:
        ValueError: the pictures are too small for it.
    """
    if not pictures:
        return "small"
    height, width = next(entry.shape[:2] for entry in env.layout if entry.name in pictures)
    fits = min(height, width) >= SMALLEST["nature"]
    if cnn_type == "nature" and not fits:
        raise ValueError(
            f"policy.cnn_type=nature: it needs pictures of {SMALLEST['nature']} x {SMALLEST['nature']}, and those of "
            f"{env.id} have {height} x {width}. Use small, or auto."
        )
    return cnn_type if cnn_type != "auto" else "nature" if fits else "small"


def refuse_texts(env: VectorEnv, model_type: str) -> None:
    """Refuse text observations, which policies of numbers and pictures do not support.

    Raises:
        ValueError: the environment has a text observation.
    """
    texts = [entry.name for entry in env.layout if entry.kind == "text"]
    if texts:
        raise ValueError(
            f"{env.id}: policy.model_type={model_type} reads no text, such as {texts[0]}. Use openvla, or leave it "
            f"out with env.train.drop_observations=[{texts[0]}]."
        )
