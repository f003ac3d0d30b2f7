"""The three levels at which a policy of action chunks is trained: a column of an action, an action, a chunk.

A chunk is K actions of D columns each, concatenated: columns [..., K * D]. At a level it has L numbers: K * D at
``token_level``, K at ``action_level``, 1 at ``chunk_level``. If an episode ended within a chunk, a mask [..., K] has
the actions that were executed; the others are ignored.
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
        level: the level of the result.
        chunk: K, actions per chunk.
        mask: [..., K]: actions that were executed; None means all.
    """
    if mask is not None:
        columns = torch.where(per_column(mask, columns.shape[-1]), columns, 0.0)
    if level == "token_level" or columns.shape[-1] == 1:
        return columns
    if level == "action_level" and chunk > 1:
        return columns.unflatten(-1, (chunk, -1)).sum(dim=-1)
    return columns.sum(dim=-1, keepdim=True)


def to_columns(grad: Tensor, width: int, mask: Tensor | None = None) -> Tensor:
    """Return the gradient of the columns [B, width] from that of `sum_to_level` [B, L]; [B, 1] if it is the same for
    all."""
    if mask is not None:
        return torch.where(per_column(mask, width), per_column(grad, width), 0.0)
    return grad if grad.shape[1] == 1 else per_column(grad, width)


def per_column(values: Tensor, width: int) -> Tensor:
    """Repeat the number [..., L] of each action or chunk for each of its columns [..., width]."""
    return values if values.shape[-1] == width else values.repeat_interleave(width // values.shape[-1], dim=-1)


def mask_at(level: Level, mask: Tensor | None, width: int) -> Tensor | None:
    """Return the mask [B, L] of `sum_to_level`'s result, or None if all are valid: every chunk has an executed
    action."""
    if mask is None or level == "chunk_level":
        return None
    return per_column(mask, width) if level == "token_level" else mask
