"""Which rows a mini-batch has, and which rank learns from which of them: a matter of speed alone, never of the result.

The denominators of a loss are those of the whole mini-batch, whichever rank has its rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from tether.algorithms import count_valid
from tether.training.protocol import LossSizes, UpdatePlan

Assign = Callable[[Sequence[float], int], list[list[int]]]
"""(what each row costs, ranks) -> row numbers of each rank."""


@dataclass(frozen=True)
class MiniBatch:
    """A mini-batch, or the part of one that a rank has."""

    epoch: int
    number: int
    """Within the epoch."""
    rows: Tensor
    """Their numbers in the batch; of a part, in the rank's rows."""
    places: Tensor
    """Where these rows stand in the whole mini-batch."""
    sizes: LossSizes
    """Of the whole mini-batch."""


def mini_batches(mask: Tensor, plan: UpdatePlan, step: int) -> list[MiniBatch]:
    """The mini-batches of an update, in order.

    Args:
        mask: [B, T] what is learned from; a row without any is left out.
        plan: epochs and rows of a mini-batch.
        step: training step, counted from 0.
    """
    (learned,) = mask.any(dim=-1).nonzero(as_tuple=True)
    found = []
    for epoch in range(plan.epochs):
        for number, drawn in enumerate(plan.mini_batches(len(learned), step, epoch)):
            rows = learned[drawn]
            valid = count_valid(mask[rows])
            sizes = LossSizes(int(valid.num_tokens), int(valid.num_sequences))
            found.append(MiniBatch(epoch, number, rows, torch.arange(len(rows)), sizes))
    return found


def divide(
    minis: Sequence[MiniBatch], costs: Sequence[float], ranks: int, assign: Assign
) -> list[tuple[Tensor, list[MiniBatch]]]:
    """Divide each mini-batch among ranks.

    Args:
        minis: of the whole batch.
        costs: of each row of the batch.
        ranks: how many.
        assign: for example `balanced`.

    Returns:
        For each rank its rows of the batch, ascending, and its part of each mini-batch.
    """
    dealt = [assign([costs[row] for row in mini.rows.tolist()], ranks) for mini in minis]
    shares = []
    for rank in range(ranks):
        parts = [torch.tensor(deal[rank], dtype=torch.int64) for deal in dealt]
        whole = [mini.rows[part] for mini, part in zip(minis, parts, strict=True)]
        rows = torch.cat([*whole, torch.empty(0, dtype=torch.int64)]).unique()
        of_rank = [
            replace(mini, rows=torch.searchsorted(rows, numbers), places=part)
            for mini, numbers, part in zip(minis, whole, parts, strict=True)
        ]
        shares.append((rows, of_rank))
    return shares


def in_order(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Rows to ranks as they stand, as many to each."""
    return [part.tolist() for part in torch.arange(len(costs)).tensor_split(ranks)]


def balance_metrics(
    minis: Sequence[MiniBatch],
    shares: Sequence[tuple[Tensor, list[MiniBatch]]],
    tokens: Sequence[int],
    costs: Sequence[float],
) -> dict[str, float]:
    """Balance of the ranks: tokens of a rank in a pass over the batch, and what they cost.

    Args:
        minis: of the whole batch.
        shares: of them, see `divide`.
        tokens: of each row.
        costs: of each row.
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
    """[ranks][mini-batches of the first pass] what the rows cost."""
    return [
        [sum(costs[row] for row in rows[part.rows].tolist()) for part in parts if part.epoch == 0]
        for rows, parts in shares
    ]


def balanced(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Rows to ranks so that each has about as much to do; each rank's rows ascend.

    The largest differencing method (Karmarkar and Karp 1982): of the divisions whose heaviest and lightest rank differ
    most, two at a time become one, heaviest with lightest.
    """
    order = count()
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    empty: list[tuple[float, list[int]]] = [(0.0, [])] * (ranks - 1)
    for row, cost in enumerate(costs):
        heapq.heappush(heap, (-cost, next(order), [*empty, (cost, [row])]))
    while len(heap) > 1:
        (_, _, left), (_, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(left, reversed(right), strict=True)
        both = sorted(((a + b, [*mine, *theirs]) for (a, mine), (b, theirs) in pairs), key=lambda part: part[0])
        heapq.heappush(heap, (both[0][0] - both[-1][0], next(order), both))
    parts = [rows for _, rows in heap[0][2]] if heap else [[] for _ in range(ranks)]
    return [sorted(rows) for rows in reversed(parts)]
