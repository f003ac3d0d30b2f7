"""Where a rollout keeps observations: flat rows as they come, or numbers beside a picture of bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tether.envs.protocol import Floats
from tether.models.control.pictures import NUMBERS, PICTURE, Pictures
from tether.models.control.spec import Observations


class ObservationBuffer:
    """Observations of T steps in M columns, allocated once.

    Args:
        shape: T, M.
        size: entries of a flat observation.
        pictures: what the policy sees as a picture, which is kept as bytes; None: nothing.
    """

    def __init__(self, shape: tuple[int, int], size: int, pictures: Pictures | None) -> None:
        self._pictures = pictures
        self.entries = np.arange(size) if pictures is None else pictures.numbers
        """Entries of a flat observation that are kept in `numbers`."""
        if pictures is None:
            numbers = torch.zeros(*shape, size)
            self.tensors: Observations = numbers
            """[T, M, ...]"""
        else:
            numbers = torch.zeros(*shape, len(pictures.numbers))
            picture = torch.zeros(*shape, *pictures.shape, dtype=torch.uint8)
            self.tensors = TensorDict({NUMBERS: numbers, PICTURE: picture}, batch_size=shape)
        self.numbers: Floats = numbers.numpy()
        """[T, M, ...]: what could be not finite."""

    def write(self, step: int, columns: slice, rows: Floats) -> Any:
        """Keep flat observations [N, size]; returns them as they are kept."""
        if self._pictures is None:
            self.numbers[step, columns] = rows
            return self.numbers[step, columns]
        packed = self._pictures(rows)
        self.tensors[step, columns] = packed
        return packed

    def pack(self, rows: Floats) -> Observations:
        """Flat observations [F, size] as they are kept."""
        return torch.from_numpy(rows) if self._pictures is None else self._pictures(rows)
