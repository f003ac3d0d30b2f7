"""What the entries of a flat observation are: numbers, pictures, texts, each a stretch of the row.

Everything that steps environments handles flat rows; what has to see a picture as one, or writes observations to files,
takes them apart by their layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from tether.envs.protocol import Floats, ObsLayout, ObsPart
from tether.envs.spaces.spaces import as_picture, flat_size, is_picture, text_codes

PLAIN_NAMES: Mapping[str, str] = {"vector": "state", "image": "image"}
TASK = "task"


def layout_of(space: Space[Any], env_id: str) -> ObsLayout:
    """The layout of `tether.envs.spaces.spaces.flatten`.

    Raises:
        ValueError: see `tether.envs.spaces.spaces.flat_size`; or there are several texts.
    """
    layout = _layout(space, "", 0, env_id)
    if sum(part.kind == "text" for part in layout) > 1:
        raise ValueError(f"{env_id}: no policy reads several texts. Leave one in the observation space: {space}")
    return layout


def split(layout: ObsLayout, rows: Floats) -> dict[str, NDArray[Any]]:
    """Take flat observations [T, O] apart: numbers [T, n], pictures [T, H, W, C] uint8, texts [T] str."""
    parts: dict[str, NDArray[Any]] = {}
    for part in layout:
        stretch = rows[:, part.entries].reshape(len(rows), *part.shape)
        if part.kind == "vector":
            parts[part.name] = stretch
        elif part.kind == "image":
            parts[part.name] = stretch.astype(np.uint8)
        else:
            parts[part.name] = np.array([_text(codes) for codes in stretch])
    return parts


def join(layout: ObsLayout, parts: Mapping[str, NDArray[Any]]) -> Floats:
    """Lay observations out flat: the inverse of `split`.

    Raises:
        ValueError: a part is missing, or of another shape; names it and both shapes.
    """
    columns = []
    for part in layout:
        if part.name not in parts:
            raise ValueError(f"{part.name}: the environment shows it, but here are only {', '.join(parts)}")
        given = parts[part.name]
        if part.kind == "text":
            given = np.stack([text_codes(str(text), part.shape[0]) for text in given])
        if given.shape[1:] != part.shape:
            raise ValueError(f"{part.name}: {given.shape[1:]} here, but {part.shape} in the environment")
        columns.append(given.reshape(len(given), -1).astype(np.float32))
    return np.concatenate(columns, axis=1)


def _layout(space: Space[Any], name: str, start: int, env_id: str) -> ObsLayout:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        found: ObsLayout = ()
        for key, part in inner:
            found += _layout(part, f"{name}.{key}" if name else str(key), start, env_id)
            start = found[-1].entries.stop
        return found
    kind: Literal["vector", "image", "text"] = "vector"
    shape: tuple[int, ...] = (flat_size(space, env_id),)
    if isinstance(space, spaces.Text):
        kind = "text"
    elif is_picture(space):
        kind, shape = "image", as_picture(np.zeros((1, *(space.shape or ())), dtype=np.uint8)).shape[1:]
    return (ObsPart(TASK if kind == "text" else name or PLAIN_NAMES[kind], kind, shape, start),)


def _text(codes: Floats) -> str:
    return codes.astype(np.uint8).tobytes().rstrip(b"\0").decode()
