"""Inputs of networks from observations: one flat row of numbers for perceptrons, one stack of pictures for a CNN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tether.observations import ObsLayout, ObsPart, row_width

NUMBERS, PICTURE, TEXT, ALLOWED = "numbers", "picture", "text", "allowed"
ObservationBatch: TypeAlias = Mapping[str, Tensor] | TensorDict
"""Part -> [..., *shape], as the environments show it."""


class FlatRow:
    """Lays parts side by side as float32: choices one-hot, pictures [height, width, channels], as bytes what is bytes.

    A mask is no part of it.

    Args:
        layout: all parts of an observation.
        without: names of those that something else reads.
    """

    def __init__(self, layout: ObsLayout, without: Sequence[str] = ()) -> None:
        self._first = layout[0]
        self._parts = tuple(part for part in layout if part.name not in without and part.kind != "mask")
        self.width = row_width(self._parts)
        alone = self._parts[0] if len(self._parts) == 1 else None
        self.is_part = alone.name if alone is not None and (alone.dtype, alone.choices) == ("float32", ()) else None
        """Name of the part that is the row already; None: it has to be made."""

    def __call__(self, obs: ObservationBatch) -> Tensor:
        """Parts [..., *shape] -> [..., width]."""
        if self.is_part is not None:
            row: Tensor = obs[self.is_part]
            return row
        if self._parts:
            return torch.cat([_column(part, obs[part.name]) for part in self._parts], dim=-1)
        rows = obs[self._first.name].shape[: -len(self._first.shape)]
        return torch.zeros(*rows, 0)


class Pictures:
    """Stacks the channels of pictures of one size.

    Args:
        layout: all parts of an observation.
        names: of the pictures.
    """

    def __init__(self, layout: ObsLayout, names: Sequence[str]) -> None:
        self._names = tuple(names)
        shapes = [part.shape for part in layout if part.name in names]
        height, width, _ = shapes[0]
        self.shape: tuple[int, int, int] = (sum(channels for *_, channels in shapes), height, width)
        """Channels, height, width."""

    def __call__(self, obs: ObservationBatch) -> Tensor:
        """Bytes [..., channels, height, width], in memory as they came: channels last."""
        return torch.cat([obs[name] for name in self._names], dim=-1).movedim(-1, -3)


def _column(part: ObsPart, values: Tensor) -> Tensor:
    """The stretch [..., part.width] of a row."""
    if not part.choices:
        return values.flatten(-len(part.shape)).float()
    chosen = zip(values.unbind(-1), part.choices, strict=True)
    return torch.cat([nn.functional.one_hot(value, count) for value, count in chosen], dim=-1).float()
