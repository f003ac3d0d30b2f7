"""The samples of a control policy: decisions, each on the actions of a chunk, and the weights of their losses.

S decisions are rows. For a policy with a memory they form M sequences of C, one per column of the rollout, and the
shape [S, ...] below is [M, C, ...]; the memory has which of them are trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tether.algorithms.aggregation import loss_divisors
from tether.control.policies import Memory, Observations

EPISODES_WEIGH_EQUALLY = "masked_mean_ratio"


@dataclass(frozen=True)
class Samples:
    """Decisions to train on, one per row. K: actions of a chunk; D: columns of an action; L: as in `chunk_levels`."""

    obs: Observations
    """[S, ...] inputs of the networks."""
    actions: Tensor
    """[S, K * D]"""
    old_log_probs: Tensor
    """[S, L] log-probs under the policy that sampled."""
    advantages: Tensor
    """[S, L]"""
    values: Tensor | None = None
    """[S, V] values of the critic at sampling; None without a critic."""
    returns: Tensor | None = None
    """[S, V]"""
    mask: Tensor | None = None
    """[S, K]: which actions were executed, at least the first; None means all."""
    weights: Tensor | None = None
    """[S, 1] weight of the row in the loss, if episodes have equal weights."""
    memory: Memory | None = None
    observed: TensorDict | None = None
    """[N] observations that update the policy's statistics after the update; they belong to no row."""
    selected: Tensor | None = None
    """[S, L]: elements that the policy loss treats differently."""

    def __len__(self) -> int:
        """Return the number of rows, or of sequences."""
        return len(self.obs)

    def __getitem__(self, rows: Tensor | slice) -> Samples:
        """Return some of the rows, or of the sequences."""
        return self.each(lambda column: column[rows])

    def to(self, device: torch.device) -> Samples:
        """Return the same rows on a device."""
        return self.each(lambda column: column.to(device))

    @property
    def response_mask(self) -> Tensor:
        """Return [S, K]: which actions were executed."""
        return torch.ones(len(self), 1, dtype=torch.bool) if self.mask is None else self.mask

    def split(self, size: int) -> Iterator[Samples]:
        """Split into chunks of `size` decisions, the last one possibly smaller; sequences are not split."""
        if self.memory is not None:
            size //= self.memory.selected.shape[1]
        for start in range(0, len(self), size):
            yield self.each(lambda column, start=start: column[start : start + size])  # type: ignore[misc]

    def decisions(self) -> Samples:
        """Return the decisions to train on, one per row, also with a memory; the observations are unchanged."""
        if self.memory is None:
            return self
        selected = self.memory.selected
        return replace(self.each(lambda column: column[selected], "obs", "memory"), memory=None)

    def each(self, change: Callable[[Tensor], Tensor], *but: str) -> Samples:
        """Apply a function to each column except some; `observed` is unchanged."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            if column is not None and field.name not in (*but, "observed"):
                changed[field.name] = column.each(change) if isinstance(column, Memory) else change(column)
        return replace(self, **changed)


def dealt(samples: Samples, ranks: int) -> list[tuple[Samples, Observations]]:
    """Distribute the observations over ranks, row by row in turn, and return each rank's samples and observations.

    Instead of its observation, each row of the samples has its index among the rank's observations, or -1 if it is on
    another rank.
    """
    owner = torch.arange(len(samples)) % ranks
    shards = []
    for mine in (owner == rank for rank in range(ranks)):
        numbers = torch.where(mine, mine.cumsum(0) - 1, -1)
        shards.append((replace(samples, obs=numbers), samples.obs[mine]))
    return shards


def loss_weights(
    mode: str,
    loss: Tensor,
    mask: Tensor | None,
    episode_weights: Tensor | None,
    max_length: float | None,
    totals: tuple[int, int] | None = None,
) -> Tensor | float:
    """Return the weight of each element of a loss [B, L] in its mean over a mini-batch; the rows are its sequences.

    It is the derivative of `tether.algorithms.aggregate_loss`, or of `masked_mean_ratio`, by its loss.

    Args:
        mode: the aggregation mode.
        loss: a tensor of the shape of the loss.
        mask: [B, L]: valid elements; None means all.
        episode_weights: [B, 1] weights for ``masked_mean_ratio``.
        max_length: the divisor of modes with ``-norm``.
        totals: rows and valid elements of the mini-batch, if `loss` is only one micro-batch of it.
    """
    rows, columns = loss.shape
    elements = loss.numel() if mask is None else mask.sum()
    if totals is not None:
        rows, elements = totals
    if mode == EPISODES_WEIGH_EQUALLY:
        assert episode_weights is not None
        alike = episode_weights / (rows * columns)
        return alike if mask is None else alike * mask
    of_row, of_all = loss_divisors(
        mode,
        columns if mask is None else mask.sum(dim=1, keepdim=True),
        num_tokens=elements,
        num_sequences=rows,
        max_length=columns if max_length is None else max_length,
    )
    return 1 / (of_row * of_all) if mask is None else mask.to(loss.dtype) / (of_row * of_all)
