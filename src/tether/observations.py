"""Observations as named fields, each with its own type: numbers, choices, byte images, texts.

The fields keep these types from the simulator to the policy and in recorded episodes; a consumer that needs one flat
row flattens them itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""An array whose dtype is only known at run time."""
Observation: TypeAlias = dict[str, Array]
"""Field name -> [N, *shape]: observations of N environments, or of one environment in N steps."""
TASK = "task"
"""Name of the text field, the task description."""
ACTION_MASK = "action_mask"
"""Name of the field that marks the allowed choices, and of its entry in an environment's infos."""


@dataclass(frozen=True)
class ObsPart:
    """One field of an observation."""

    name: str
    """Key in the Dict space of the environment, nested keys joined by dots; ``state`` or ``image`` for a plain space;
    always ``task`` for a text."""
    kind: Literal["vector", "image", "text", "mask"]
    shape: tuple[int, ...]
    """(n,) numbers; (height, width, channels) of an image; (max length,) bytes of a text in UTF-8, padded with zeros;
    (n,) alternatives of all choices of an action, concatenated: 1 where an alternative is allowed."""
    dtype: str = "float32"
    """Name of the dtype in NumPy."""
    choices: tuple[int, ...] = ()
    """Number of alternatives of each choice, whose values count from 0; empty: the numbers are quantities."""

    @property
    def width(self) -> int:
        """Width in a flat row: one entry for each alternative, number, pixel channel or byte; 0 for a mask."""
        if self.kind == "mask":
            return 0
        return sum(self.choices) or math.prod(self.shape)

    def zeros(self, *rows: int) -> Array:
        """Return an observation of zeros, [*rows, *shape]."""
        return np.zeros((*rows, *self.shape), dtype=self.dtype)


ObsLayout: TypeAlias = tuple[ObsPart, ...]


def row_width(layout: ObsLayout) -> int:
    """Return the width of a flat row of all fields."""
    return sum(field.width for field in layout)


def describe(layout: ObsLayout) -> str:
    """Describe the fields as text: ``state (4,), image (7, 7, 3)``."""
    return ", ".join(f"{field.name} {field.shape}" for field in layout)


def copied(obs: Observation) -> Observation:
    """Return a copy of the fields."""
    return {name: array.copy() for name, array in obs.items()}


def shapes(obs: Observation) -> dict[str, tuple[int, ...]]:
    """Return the shape of each field without the row dimension."""
    return {name: array.shape[1:] for name, array in obs.items()}


def encode_text(text: str, size: int) -> NDArray[np.uint8]:
    """Return the bytes of a text, padded with zeros.

    Raises:
        ValueError: the text has more than `size` bytes.
    """
    codes = text.encode()
    if len(codes) > size:
        raise ValueError(f"the text {text!r} has {len(codes)} bytes, more than its space allows ({size})")
    return np.frombuffer(codes.ljust(size, b"\0"), dtype=np.uint8)


def decode_text(codes: Array) -> str:
    """Return the text that `encode_text` encoded."""
    return codes.tobytes().rstrip(b"\0").decode()


def recorded(layout: ObsLayout, obs: Mapping[str, Array]) -> Observation:
    """Return an observation [T, ...] in the form in which episodes store it, with texts as strings."""
    return {
        field.name: np.array(list(map(decode_text, obs[field.name]))) if field.kind == "text" else obs[field.name]
        for field in layout
    }


def played(layout: ObsLayout, recording: Mapping[str, Array]) -> Observation:
    """Return recorded fields [T, ...] in the environment's own form: the inverse of `recorded`.

    Raises:
        ValueError: a field is missing, or has another shape or type.
    """
    obs = {}
    for field in layout:
        if field.name not in recording:
            raise ValueError(f"{field.name}: the environment shows it, but here are only {', '.join(recording)}")
        array = recording[field.name]
        if field.kind == "text":
            array = np.stack([encode_text(str(text), field.shape[0]) for text in array])
        if array.shape[1:] != field.shape:
            raise ValueError(f"{field.name}: {array.shape[1:]} here, but {field.shape} in the environment")
        if not np.can_cast(array.dtype, field.dtype, "same_kind"):
            raise ValueError(f"{field.name}: {array.dtype} here, but {field.dtype} in the environment")
        obs[field.name] = array.astype(field.dtype, copy=False)
    return obs
