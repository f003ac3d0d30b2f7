"""Which entries of a flat observation are a picture."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

NUMBERS, PICTURE = "numbers", "picture"


class Pictures:
    """Takes flat observations apart into numbers and one picture of bytes.

    Args:
        size: entries of a flat observation.
        parts: (first entry, height, width, channels) of each picture; all of one size, stacked as channels.
    """

    def __init__(self, size: int, parts: tuple[tuple[int, int, int, int], ...]) -> None:
        entries = [first + np.arange(np.prod(shape)).reshape(shape) for first, *shape in parts]
        pixels = np.moveaxis(np.concatenate(entries, axis=2), 2, 0)
        self.shape: tuple[int, int, int] = pixels.shape
        """Channels, height, width."""
        self._pixels = pixels.ravel()
        self.numbers: NDArray[np.int64] = np.setdiff1d(np.arange(size), pixels)
        """Entries that are in no picture."""

    def __call__(self, rows: NDArray[np.float32]) -> TensorDict:
        """Flat observations [N, size] -> NUMBERS [N, ...] and PICTURE [N, channels, height, width]."""
        pixels = rows[:, self._pixels].astype(np.uint8).reshape(len(rows), *self.shape)
        parts = {NUMBERS: torch.from_numpy(rows[:, self.numbers]), PICTURE: torch.from_numpy(pixels)}
        return TensorDict(parts, batch_size=[len(rows)])
