"""The view that a control policy has of an environment's observations."""

from __future__ import annotations

from tether.envs import VectorEnv
from tether.models.control import SMALLEST
from tether.observations import describe


def find_pictures(env: VectorEnv, model_type: str) -> tuple[str, ...]:
    """``PolicySpec.pictures``: those among the parts of an observation.

    Raises:
        ValueError: there are none, or of different sizes.
    """
    pictures = [part for part in env.layout if part.kind == "image"]
    if len({part.shape[:2] for part in pictures}) != 1:
        what = "pictures of different sizes" if pictures else "no picture of bytes"
        raise ValueError(
            f"policy.model_type={model_type}: {env.id} shows {what} ({describe(env.layout)}). Use mlp_policy, or leave "
            "a part out with env.train.drop_observations."
        )
    return tuple(part.name for part in pictures)


def fitting_cnn(asked: str, env: VectorEnv, pictures: tuple[str, ...]) -> str:
    """The ``PolicySpec.cnn_type`` for some pictures: what is asked for, or for ``auto`` what fits their size.

    Raises:
        ValueError: the pictures are too small for it.
    """
    if not pictures:
        return "small"
    height, width = next(part.shape[:2] for part in env.layout if part.name in pictures)
    fits = min(height, width) >= SMALLEST["nature"]
    if asked == "nature" and not fits:
        raise ValueError(
            f"policy.cnn_type=nature: it needs pictures of {SMALLEST['nature']} x {SMALLEST['nature']}, and those of "
            f"{env.id} have {height} x {width}. Use small, or auto."
        )
    return asked if asked != "auto" else "nature" if fits else "small"


def refuse_texts(env: VectorEnv, model_type: str) -> None:
    """No policy of numbers and pictures reads a text.

    Raises:
        ValueError: the environment shows one.
    """
    texts = [part.name for part in env.layout if part.kind == "text"]
    if texts:
        raise ValueError(
            f"{env.id}: policy.model_type={model_type} reads no text, such as {texts[0]}. Use openvla, or leave it "
            f"out with env.train.drop_observations=[{texts[0]}]."
        )
