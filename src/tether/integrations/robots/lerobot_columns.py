"""Reads the columns of a parquet file in LeRobot's format as arrays with the types and shapes in the metadata."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

from tether.integrations.robots.lerobot_meta import (
    EPISODE,
    FRAME,
    IMAGE,
    REWARD,
    SUCCESS,
    TASK_INDEX,
    Feature,
    Meta,
    read_parquet,
)
from tether.observations import Array
from tether.runtime.install import pip_install

FLAT = (EPISODE, FRAME, TASK_INDEX, REWARD, SUCCESS)
"""Columns with a single number per frame, [T]; other columns are [T, width]."""


def read_columns(file: Path, meta: Meta) -> dict[str, Array]:
    """Read the columns of the metadata's features from a file.

    Returns:
        Name -> numbers [T, width] ([T] for `FLAT`), or uint8 images [T, H, W, C].

    Raises:
        ValueError: the file is broken, lacks a column, or a row does not match the metadata.
    """
    cells = read_parquet(file, meta.features)
    for name in meta.features:
        if name not in cells:
            raise ValueError(f"{file}: no column {name}, a feature in meta/info.json. Write one, or take it out there.")
    if not cells[FRAME]:
        raise ValueError(f"{file}: holds no frames. Take it away.")
    return {name: _column(cells[name], name, feature, file) for name, feature in meta.features.items()}


def png() -> ModuleType:
    """Return the module that reads and writes PNG images.

    Raises:
        ValueError: Pillow is not installed.
    """
    try:
        return importlib.import_module("tether.integrations.robots.png")
    except ModuleNotFoundError as error:
        raise ValueError(f"pictures need the package Pillow. Run: {pip_install('vla')}") from error


def _column(cells: list[object], name: str, feature: Feature, file: Path) -> Array:
    if feature.dtype == IMAGE:
        return np.stack([_picture(cell, feature, f"{file}: row {row}: {name}") for row, cell in enumerate(cells)])
    column = _numbers(cells, feature)
    if isinstance(column, str):
        reasons = ((row, _numbers([cell], feature)) for row, cell in enumerate(cells))
        row, why = next(((row, why) for row, why in reasons if isinstance(why, str)), (0, column))
        raise ValueError(f"{file}: row {row}: {name} is {_short(cells[row])}, {why}")
    return column[:, 0] if name in FLAT else column


def _numbers(cells: list[object], feature: Feature) -> Array | str:
    """Return the numbers of frames [T, width], or a description of the problem."""
    described = f"not {feature.width} numbers, as meta/info.json says. Correct one of them, or leave the episode out."
    try:
        numbers = np.array(cells).reshape(len(cells), -1)
    except ValueError:  # lists of different lengths
        return described
    if numbers.dtype.kind not in "biuf" or numbers.shape[1] != feature.width:
        return described
    cast = numbers.astype(feature.dtype)
    fits = cast.dtype.kind == "f" if numbers.dtype.kind == "f" else np.array_equal(cast, numbers)
    return cast if fits else f"no {feature.dtype}, the dtype in meta/info.json. Write the dtype of the column there."


def _picture(cell: object, feature: Feature, where: str) -> Array:
    data = cell.get("bytes") if isinstance(cell, dict) else None
    if not isinstance(data, bytes):
        raise ValueError(f"{where} is {_short(cell)}, no bytes of a picture. Store them in the parquet file.")
    decode: Callable[[bytes], Array] = png().decode_png
    try:
        picture = decode(data)
    except (OSError, SyntaxError) as error:  # Pillow raises the second one for a broken PNG
        raise ValueError(f"{where}: these {len(data)} bytes are no readable picture. Leave the episode out.") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    channels_last = (*feature.shape[1:], feature.shape[0]) if feature.shape else ()
    if picture.shape not in (feature.shape, channels_last, (*feature.shape, 1)):
        what = f"a picture of shape {list(picture.shape)}, but {list(feature.shape)} in meta/info.json"
        raise ValueError(f"{where}: {what}. Correct one of the two.")
    return picture


def _short(cell: object) -> str:
    text = repr(cell)
    return text if len(text) <= 60 else f"{text[:57]}..."
