"""Where a rollout keeps observations: flat rows as they come, or numbers beside a picture of bytes."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from tether.envs.protocol import Floats
from tether.models.control.pictures import NUMBERS, PICTURE, Pictures
from tether.models.control.spec import Observations, numbers_of


class ObservationBuffer:
    """Observations of T steps in M columns.

    Args:
        tensors: [M, T, ...]
        pictures: what the policy sees as a picture, which is kept as bytes; None: nothing.
    """

    def __init__(self, tensors: Observations, pictures: Pictures | None) -> None:
        self.tensors = tensors
        self._pictures = pictures
        self.numbers: Floats = numbers_of(tensors).numpy()
        """[M, T, ...]: what could be not finite."""

    @classmethod
    def allocate(cls, shape: tuple[int, int], size: int, pictures: Pictures | None) -> ObservationBuffer:
        """Room for observations of `size` entries; `shape` is M, T."""
        if pictures is None:
            return cls(torch.zeros(*shape, size), None)
        numbers = torch.zeros(*shape, len(pictures.numbers))
        picture = torch.zeros(*shape, *pictures.shape, dtype=torch.uint8)
        return cls(TensorDict({NUMBERS: numbers, PICTURE: picture}, batch_size=shape), pictures)

    def part(self, columns: slice) -> ObservationBuffer:
        """Some of the columns."""
        return ObservationBuffer(self.tensors[columns], self._pictures)

    def write(self, step: int, rows: Floats) -> None:
        """Keep flat observations [M, size]."""
        if self._pictures is None:
            self.numbers[:, step] = rows
        else:
            self.tensors[:, step] = self._pictures(rows)

    def read(self, step: int) -> Any:
        """What a policy acts on, [M, ...]."""
        return self.numbers[:, step] if self._pictures is None else self.tensors[:, step]

    def pack(self, rows: Floats) -> Observations:
        """Flat observations [F, size] as they are kept."""
        return torch.from_numpy(rows) if self._pictures is None else self._pictures(rows)

    def entry(self, number: int) -> int:
        """The entry of a flat observation that is kept as the `number`-th of `numbers`."""
        return number if self._pictures is None else int(self._pictures.numbers[number])
