"""Ways to break a run: a table that they pass would prove nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tether.batch import TrainBatch
from tether.loop.loop import Trainer


def flip(batch: TrainBatch) -> Tensor:
    """The sign of every advantage is wrong."""
    return -batch.advantages


def shuffle(batch: TrainBatch) -> Tensor:
    """Every row gets the advantages of another one."""
    rows = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    per_row = batch.advantages.sum(dim=-1) / batch.response_mask.sum(dim=-1).clamp(min=1)
    return per_row[rows][:, None] * batch.response_mask


def _breaking(breakage: Callable[[TrainBatch], Tensor]) -> Callable[[Trainer], None]:
    def sabotage(trainer: Trainer) -> None:
        estimate = trainer.estimate_advantages

        def broken(batch: TrainBatch) -> dict[str, float]:
            metrics = estimate(batch)
            batch.advantages = breakage(batch)
            return metrics

        trainer.estimate_advantages = broken

    return sabotage


SABOTAGES: dict[str, Callable[[Trainer], None]] = {"flipped": _breaking(flip), "shuffled": _breaking(shuffle)}
"""Name -> what to do to a trainer before its first step."""
