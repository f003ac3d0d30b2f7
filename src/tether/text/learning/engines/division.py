"""Division of a batch into mini-batches and of their rows over ranks, which affects speed only, never the result.

The denominators of a loss are those of the whole mini-batch, whatever the division.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from tether.algorithms import count_valid
from tether.loop.engine import LossSizes, UpdatePlan

Assign = Callable[[Sequence[float], int], list[list[int]]]
"""Maps the cost of each row and the number of ranks to the row indices of each rank."""


@dataclass(frozen=True)
class MiniBatch:
    """A mini-batch, or a rank's share of one."""

    epoch: int
    number: int
    """Index of the mini-batch within the epoch."""
    rows: Tensor
    """Row indices in the batch; for a rank's share, in the rank's rows."""
    positions: Tensor
    """Positions of these rows in the whole mini-batch."""
    sizes: LossSizes
    """Sizes of the whole mini-batch."""


def mini_batches(mask: Tensor, plan: UpdatePlan, step: int) -> list[MiniBatch]:
    """Return the mini-batches of an update, in order.

    Args:
        mask: [B, T] elements to train on; rows without any are omitted.
        plan: the number of epochs and the rows of a mini-batch.
        step: training step, counted from 0.
    """
    (learned,) = mask.any(dim=-1).nonzero(as_tuple=True)
    minis = []
    for epoch in range(plan.epochs):
        for number, drawn in enumerate(plan.mini_batches(len(learned), step, epoch)):
            rows = learned[drawn]
            valid = count_valid(mask[rows])
            sizes = LossSizes(int(valid.num_tokens), int(valid.num_sequences))
            minis.append(MiniBatch(epoch, number, rows, torch.arange(len(rows)), sizes))
    return minis


def divide(
    minis: Sequence[MiniBatch], costs: Sequence[float], ranks: int, assign: Assign
) -> list[tuple[Tensor, list[MiniBatch]]]:
    """Divide each mini-batch among ranks.

    Args:
        minis: the mini-batches of the whole batch.
        costs: the cost of each row of the batch.
        ranks: the number of ranks.
        assign: assigns rows to ranks, such as `balanced`.

    Returns:
        For each rank its rows of the batch, ascending, and its share of each mini-batch.
    """
    dealt = [assign([costs[row] for row in mini.rows.tolist()], ranks) for mini in minis]
    shares = []
    for rank in range(ranks):
        positions = [torch.tensor(deal[rank], dtype=torch.int64) for deal in dealt]
        batch_rows = [mini.rows[index] for mini, index in zip(minis, positions, strict=True)]
        rows = torch.cat([*batch_rows, torch.empty(0, dtype=torch.int64)]).unique()
        of_rank = [
            replace(mini, rows=torch.searchsorted(rows, numbers), positions=index)
            for mini, numbers, index in zip(minis, batch_rows, positions, strict=True)
        ]
        shares.append((rows, of_rank))
    return shares


def in_order(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign rows to ranks in order, equally many to each."""
    return [rows.tolist() for rows in torch.arange(len(costs)).tensor_split(ranks)]


def balance_metrics(
    minis: Sequence[MiniBatch],
    shares: Sequence[tuple[Tensor, list[MiniBatch]]],
    tokens: Sequence[int],
    costs: Sequence[float],
) -> dict[str, float]:
    """Return metrics of the balance over ranks: tokens per rank in a pass over the batch, and their costs.

    Args:
        minis: the mini-batches of the whole batch.
        shares: the result of `divide`.
        tokens: the tokens of each row.
        costs: the cost of each row.
    """
    ranks = len(shares)
    undealt = divide(minis, costs, ranks, in_order)
    before, after = (torch.tensor(_loads(dealt, tokens)).sum(dim=1) for dealt in (undealt, shares))
    work = torch.tensor(_loads(shares, costs), dtype=torch.float64)
    mean = float(after.double().mean())
    return {
        "global_seqlen/min": float(before.min()),
        "global_seqlen/max": float(before.max()),
        "global_seqlen/minmax_diff": float(before.max() - before.min()),
        "global_seqlen/balanced_min": float(after.min()),
        "global_seqlen/balanced_max": float(after.max()),
        "global_seqlen/mean": mean,
        "global_seqlen/busiest_over_mean": float(work.amax(dim=0).sum() / work.mean(dim=0).sum()) if mean else 1.0,
    }


def _loads(shares: Sequence[tuple[Tensor, list[MiniBatch]]], costs: Sequence[float]) -> list[list[float]]:
    """Return [ranks][mini-batches of the first pass]: the costs of the rows."""
    return [
        [sum(costs[row] for row in rows[mini.rows].tolist()) for mini in minis if mini.epoch == 0]
        for rows, minis in shares
    ]


def balanced(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign rows to ranks so that their costs are about equal; each rank's rows ascend.

    It is the largest differencing method (Karmarkar and Karp 1982): the two divisions with the largest differences
    between heaviest and lightest rank are merged, heaviest with lightest, until one is left.
    """
    order = count()
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    empty: list[tuple[float, list[int]]] = [(0.0, [])] * (ranks - 1)
    for row, cost in enumerate(costs):
        heapq.heappush(heap, (-cost, next(order), [*empty, (cost, [row])]))
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(first, reversed(second), strict=True)
        both = sorted(((a + b, [*mine, *theirs]) for (a, mine), (b, theirs) in pairs), key=lambda share: share[0])
        heapq.heappush(heap, (both[0][0] - both[-1][0], next(order), both))
    assigned = [rows for _, rows in heap[0][2]] if heap else [[] for _ in range(ranks)]
    return [sorted(rows) for rows in reversed(assigned)]
