"""Observations as named parts, each in its own type: numbers, choices, pictures of bytes, texts.

They stay so from the simulator to the policy, and in recorded episodes; whoever reads one flat row lays it out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""Its dtype is known at run time only."""
Observation: TypeAlias = dict[str, Array]
"""Part -> [N, *shape]: what N environments show, or one in N steps."""
TASK = "task"
"""Name of the part that is a text: what is to be done."""
ACTION_MASK = "action_mask"
"""Name of the part, and of the entry of an environment's infos, that says which choices are allowed."""


@dataclass(frozen=True)
class ObsPart:
    """One part of an observation."""

    name: str
    """Key in the Dict that the environment gives, keys of a nested one joined by dots; of a plain space ``state`` or
    ``image``; of a text always ``task``."""
    kind: Literal["vector", "image", "text", "mask"]
    shape: tuple[int, ...]
    """(n,) numbers; (height, width, channels) of a picture; (longest,) bytes of a text in UTF-8, zeros behind it;
    (n,) alternatives of all choices of an action, side by side: 1 where it is allowed."""
    dtype: str = "float32"
    """NumPy's name of it."""
    choices: tuple[int, ...] = ()
    """Alternatives of each number, which counts them from 0 on; empty: the numbers are quantities."""

    @property
    def width(self) -> int:
        """Entries of a flat row: one for each alternative, number, channel of a pixel or byte; none for a mask."""
        if self.kind == "mask":
            return 0
        return sum(self.choices) or math.prod(self.shape)

    def zeros(self, *rows: int) -> Array:
        """Nothing seen, [*rows, *shape]."""
        return np.zeros((*rows, *self.shape), dtype=self.dtype)


ObsLayout: TypeAlias = tuple[ObsPart, ...]


def row_width(layout: ObsLayout) -> int:
    """Entries of a flat row of all parts."""
    return sum(part.width for part in layout)


def describe(layout: ObsLayout) -> str:
    """The parts in words: ``state (4,), image (7, 7, 3)``."""
    return ", ".join(f"{part.name} {part.shape}" for part in layout)


def copied(obs: Observation) -> Observation:
    """The same parts in memory of their own."""
    return {name: part.copy() for name, part in obs.items()}


def shapes(obs: Observation) -> dict[str, tuple[int, ...]]:
    """Part -> shape without the rows."""
    return {name: part.shape[1:] for name, part in obs.items()}


def encode_text(text: str, size: int) -> NDArray[np.uint8]:
    """The bytes of a text, zeros behind it.

    Raises:
        ValueError: it has more than `size`.
    """
    codes = text.encode()
    if len(codes) > size:
        raise ValueError(f"the text {text!r} has {len(codes)} bytes, more than its space allows ({size})")
    return np.frombuffer(codes.ljust(size, b"\0"), dtype=np.uint8)


def decode_text(codes: Array) -> str:
    """The text of `encode_text`."""
    return codes.tobytes().rstrip(b"\0").decode()


def recorded(layout: ObsLayout, obs: Mapping[str, Array]) -> Observation:
    """An observation [T, ...] as episodes keep it: texts are strings."""
    return {
        part.name: np.array([decode_text(codes) for codes in obs[part.name]]) if part.kind == "text" else obs[part.name]
        for part in layout
    }


def played(layout: ObsLayout, recording: Mapping[str, Array]) -> Observation:
    """Recorded parts [T, ...] as the environment shows them: the inverse of `recorded`.

    Raises:
        ValueError: a part is missing, or of another shape or type; names it, and both.
    """
    obs = {}
    for part in layout:
        if part.name not in recording:
            raise ValueError(f"{part.name}: the environment shows it, but here are only {', '.join(recording)}")
        given = recording[part.name]
        if part.kind == "text":
            given = np.stack([encode_text(str(text), part.shape[0]) for text in given])
        if given.shape[1:] != part.shape:
            raise ValueError(f"{part.name}: {given.shape[1:]} here, but {part.shape} in the environment")
        if not np.can_cast(given.dtype, part.dtype, "same_kind"):
            raise ValueError(f"{part.name}: {given.dtype} here, but {part.dtype} in the environment")
        obs[part.name] = given.astype(part.dtype, copy=False)
    return obs
