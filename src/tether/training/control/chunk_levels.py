"""The three levels at which a policy of action chunks is looked at: a column of an action, an action, a chunk.

A chunk is K actions of D columns each, side by side: columns [..., K * D]. At a level it has L numbers: K * D at
``token_level``, K at ``action_level``, 1 at ``chunk_level``. Where an episode ended in the middle of a chunk, a mask
[..., K] says which of its actions were carried out; the others count nowhere.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Level = Literal["token_level", "action_level", "chunk_level"]


def sum_to_level(columns: Tensor, level: Level, chunk: int = 1, mask: Tensor | None = None) -> Tensor:
    """Sum columns [..., K * D] to a level, [..., L].

    Args:
        columns: log-probabilities, or entropies.
        level: of the result.
        chunk: K.
        mask: [..., K]: actions that were carried out; None: all.
    """
    if mask is not None:
        columns = torch.where(per_column(mask, columns.shape[-1]), columns, 0.0)
    if level == "token_level" or columns.shape[-1] == 1:
        return columns
    if level == "action_level" and chunk > 1:
        return columns.unflatten(-1, (chunk, -1)).sum(dim=-1)
    return columns.sum(dim=-1, keepdim=True)


def to_columns(grad: Tensor, width: int, mask: Tensor | None = None) -> Tensor:
    """Gradient of the columns, [B, width], from that of `sum_to_level`, [B, L]; [B, 1] where it is the same for all."""
    if mask is not None:
        return torch.where(per_column(mask, width), per_column(grad, width), 0.0)
    return grad if grad.shape[1] == 1 else per_column(grad, width)


def per_column(values: Tensor, width: int) -> Tensor:
    """Give each column, [..., width], the number of the action or chunk that it belongs to, [..., L]."""
    return values if values.shape[-1] == width else values.repeat_interleave(width // values.shape[-1], dim=-1)


def mask_at(level: Level, mask: Tensor | None, width: int) -> Tensor | None:
    """The mask of `sum_to_level`'s result, [B, L]; None: all count, every chunk has an action that was carried out."""
    if mask is None or level == "chunk_level":
        return None
    return per_column(mask, width) if level == "token_level" else mask
