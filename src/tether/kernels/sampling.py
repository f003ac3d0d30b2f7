"""Draws one token per row from a distribution over the vocabulary by inverting its cumulative sums.

Nothing of the vocabulary's size is sorted or accumulated: each row is summed in blocks, and the block that contains the
drawn number is located first, the token in it second.

Legend: R = rows, V = vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Vocabulary entries per sum."""


def rows_in_scratch(logits: Tensor) -> int:
    """Return the number of rows of logits [R, V] whose fp32 weights are in memory at once.

    They take 8 MiB on a CPU, about the size of a cache, and 1 GiB where each operation is a kernel launch.
    """
    return max(1, (1 << (21 if logits.device.type == "cpu" else 28)) // logits.shape[-1])


def inverse_sample(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token [R] at which the cumulative weights [R, V] exceed `uniform` [R] of their total, and its
    log-probability [R]."""
    token, total = _invert(weights, uniform)
    chosen = weights.gather(-1, token[:, None]).squeeze(-1)
    return token, chosen.log() - total.log().to(chosen.dtype)


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token [R] at which `uniform` of each row's total is exceeded, and the total [R] in the dtype of
    `uniform`."""
    missing = -weights.shape[-1] % BLOCK
    blocks = (F.pad(weights, (0, missing)) if missing else weights).view(len(weights), -1, BLOCK)
    mass = blocks.sum(dim=-1).to(uniform.dtype).cumsum(dim=-1)
    total = mass[:, -1]
    block, before = first_above(mass, uniform * total)
    inside = blocks[torch.arange(len(weights), device=weights.device), block].to(uniform.dtype).cumsum(dim=-1)
    token, _ = first_above(inside, uniform * total - before)
    return block * BLOCK + token, total


def first_above(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first entry of each row that exceeds the target, and the entry before it (0 at the
    start).

    The target is clamped strictly below the row's last entry: rounding may lift it there, and an entry without
    probability must never be drawn.
    """
    last = cumulative[:, -1]
    target = torch.minimum(target, last * (1 - torch.finfo(last.dtype).eps)).clamp(min=0)
    index = (cumulative <= target[:, None]).sum(dim=-1).clamp(max=cumulative.shape[-1] - 1)  # NaN rows stay in range
    before = cumulative.gather(-1, (index - 1).clamp(min=0)[:, None]).squeeze(-1)
    return index, torch.where(index > 0, before, 0.0)
