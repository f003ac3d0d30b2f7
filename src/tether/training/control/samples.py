"""The samples of a control policy: decisions, each on the actions of a chunk, and the weights of their losses.

S decisions are rows. For a policy with a memory they stand in M sequences of C, one for each column of the rollout, and
what is said below to be [S, ...] is [M, C, ...]; the memory says which of them are learned from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tether.algorithms.aggregation import loss_divisors
from tether.models.control import Memory, Observations

EPISODES_WEIGH_EQUALLY = "masked_mean_ratio"


@dataclass(frozen=True)
class Samples:
    """Decisions to learn from, one a row. K: actions of a chunk; D: columns of an action; L: see `levels`."""

    obs: Observations
    """[S, ...]: as the networks see them."""
    actions: Tensor
    """[S, K * D]"""
    old_log_probs: Tensor
    """[S, L]: under the policy that sampled."""
    advantages: Tensor
    """[S, L]"""
    values: Tensor | None = None
    """[S, V]: of the critic at sampling; None: there is no critic."""
    returns: Tensor | None = None
    """[S, V]"""
    mask: Tensor | None = None
    """[S, K]: actions that were carried out, at least the first; None: all."""
    weights: Tensor | None = None
    """[S, 1]: of the row in the loss, where episodes weigh alike."""
    memory: Memory | None = None
    observed: TensorDict | None = None
    """[N]: observations that the policy's statistics take in after the update; they belong to no row."""
    selected: Tensor | None = None
    """[S, L]: elements that the policy loss treats apart."""

    def __len__(self) -> int:
        """Rows, or sequences."""
        return len(self.obs)

    def __getitem__(self, rows: Tensor | slice) -> Samples:
        """Some of the rows, or sequences."""
        return self.each(lambda column: column[rows])

    def to(self, device: torch.device) -> Samples:
        """The same rows on a device."""
        return self.each(lambda column: column.to(device))

    @property
    def response_mask(self) -> Tensor:
        """[S, K]: actions that were carried out."""
        return torch.ones(len(self), 1, dtype=torch.bool) if self.mask is None else self.mask

    def split(self, size: int) -> Iterator[Samples]:
        """Pieces of `size` decisions, the last one of what is left; sequences stay whole."""
        if self.memory is not None:
            size //= self.memory.kept.shape[1]
        for start in range(0, len(self), size):
            yield self.each(lambda column, start=start: column[start : start + size])  # type: ignore[misc]

    def decisions(self) -> Samples:
        """The decisions that are learned from, one per row, whatever the memory; the observations stay as they are."""
        if self.memory is None:
            return self
        kept = self.memory.kept
        return replace(self.each(lambda column: column[kept], "obs", "memory"), memory=None)

    def each(self, change: Callable[[Tensor], Tensor], *but: str) -> Samples:
        """The same change of each column but some; `observed` stays."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            if column is not None and field.name not in (*but, "observed"):
                changed[field.name] = column.each(change) if isinstance(column, Memory) else change(column)
        return replace(self, **changed)


def dealt(samples: Samples, ranks: int) -> list[tuple[Samples, Observations]]:
    """The samples as each of several ranks has them, and the observations of its own: those of every so-manieth row.

    In the place of its observations each row has its number among these, -1 where they are another's.
    """
    owner = torch.arange(len(samples)) % ranks
    found = []
    for mine in (owner == rank for rank in range(ranks)):
        numbers = torch.where(mine, mine.cumsum(0) - 1, -1)
        found.append((replace(samples, obs=numbers), samples.obs[mine]))
    return found


def loss_weights(
    mode: str,
    loss: Tensor,
    mask: Tensor | None,
    episode_weights: Tensor | None,
    max_length: float | None,
    whole: tuple[int, int] | None = None,
) -> Tensor | float:
    """Weight of each element of a loss [B, L] in its mean over a mini-batch; the rows are its sequences.

    That is the derivative of `tether.algorithms.aggregate_loss`, or of `masked_mean_ratio`, by its loss.

    Args:
        mode: of the aggregation.
        loss: whose shape is asked for.
        mask: [B, L]: elements that count; None: all.
        episode_weights: [B, 1]: for ``masked_mean_ratio``.
        max_length: the divisor of modes with ``-norm``.
        whole: rows and elements that count in the mini-batch that `loss` is a part of; None: it is all of it.
    """
    rows, columns = loss.shape
    elements = loss.numel() if mask is None else mask.sum()
    if whole is not None:
        rows, elements = whole
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
