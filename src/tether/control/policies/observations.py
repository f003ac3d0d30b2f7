"""Inputs of networks from observations: one flat row of numbers for perceptrons, one stack of images for a CNN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tether.observations import ObsLayout, ObsPart, row_width

NUMBERS, PICTURE, TEXT, ALLOWED = "numbers", "picture", "text", "allowed"
ObservationBatch: TypeAlias = Mapping[str, Tensor] | TensorDict
"""Field name -> [..., *shape], as the environments show it."""


class FlatRow:
    """Concatenates fields as float32: choices one-hot, images [height, width, channels], bytes as numbers.

    Masks are not included.

    Args:
        layout: all fields of an observation.
        without: names of fields to leave out.
    """

    def __init__(self, layout: ObsLayout, without: Sequence[str] = ()) -> None:
        self._first = layout[0]
        self._fields = tuple(field for field in layout if field.name not in without and field.kind != "mask")
        self.width = row_width(self._fields)
        single = self._fields[0] if len(self._fields) == 1 else None
        is_row = single is not None and (single.dtype, single.choices) == ("float32", ())
        self.single_field = single.name if single is not None and is_row else None
        """Name of the field that already is the row; None: the row has to be computed."""

    def __call__(self, obs: ObservationBatch) -> Tensor:
        """Return the row [..., width] of fields [..., *shape]."""
        if self.single_field is not None:
            row: Tensor = obs[self.single_field]
            return row
        if self._fields:
            return torch.cat([_columns(field, obs[field.name]) for field in self._fields], dim=-1)
        rows = obs[self._first.name].shape[: -len(self._first.shape)]
        return torch.zeros(*rows, 0)


class Pictures:
    """Stacks the channels of images of one size.

    Args:
        layout: all fields of an observation.
        names: names of the images.
    """

    def __init__(self, layout: ObsLayout, names: Sequence[str]) -> None:
        self._names = tuple(names)
        shapes = [field.shape for field in layout if field.name in names]
        height, width, _ = shapes[0]
        self.shape: tuple[int, int, int] = (sum(channels for *_, channels in shapes), height, width)
        """Channels, height, width."""

    def __call__(self, obs: ObservationBatch) -> Tensor:
        """Return bytes [..., channels, height, width], in channels-last memory order."""
        return torch.cat([obs[name] for name in self._names], dim=-1).movedim(-1, -3)


def _columns(field: ObsPart, values: Tensor) -> Tensor:
    """Return the columns [..., field.width] of a row."""
    if not field.choices:
        return values.flatten(-len(field.shape)).float()
    chosen = zip(values.unbind(-1), field.choices, strict=True)
    return torch.cat([nn.functional.one_hot(value, count) for value, count in chosen], dim=-1).float()
