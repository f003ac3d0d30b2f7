"""Division of a batch into mini-batches, ranks and micro-batches, and of each into the token tensors that a model
reads, packed or padded.

The division affects speed and memory only, never the result: the denominators of a loss are those of the whole
mini-batch.

The head gets only the positions that predict a token under `response_mask`, so prompts, padding and tokens that the
policy did not sample never reach the vocabulary projection. Packed rows of a prompt share it, and identical responses
share their tokens, so that duplicates of a short response cost almost nothing.

Legend: B rows, T response width, R x S the model's input (1 x N packed), M = valid response tokens, where tokens of
identical responses count once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tether.algorithms import count_valid
from tether.batch import RolloutBatch, TrainBatch
from tether.kernels import AttentionLayout
from tether.loop.engine import LossSizes, UpdatePlan
from tether.text.models.layers import Packed, Padded
from tether.text.models.ulysses import SequenceRanks, Shared


class RowSize(NamedTuple):
    """The size of a row in tokens."""

    prompt: int
    """The row's `uid`, which is the same for rows of the same prompt."""
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        """Return the tokens of prompt and response."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class MicroBatching:
    """Limits of one forward and backward pass; at least one is set."""

    max_rows: int | None = None
    max_tokens: int | None = None
    """Token budget (``use_dynamic_bsz``). A row that exceeds it is a micro-batch by itself."""
    packed: bool = True
    """Whether only actual tokens count, and a shared prompt once; if False, every row counts as much as the longest one
    of its micro-batch."""
    key: str = field(default="the limit of a micro-batch", compare=False)
    """The configuration key of the limit."""
    ranks: int = field(default=1, compare=False)
    """Number of ranks that split the tokens of a micro-batch; the setting limits the tokens of one rank."""

    def __str__(self) -> str:
        """Return the setting as written in the configuration."""
        return "{}={}".format(*self.setting)

    @property
    def setting(self) -> tuple[str, int]:
        """Return the configuration key and its value."""
        if self.max_tokens is not None:
            return self.key, max(1, self.max_tokens // self.ranks)
        assert self.max_rows is not None
        return self.key, self.max_rows

    def halved(self, rows: Sequence[RowSize]) -> MicroBatching | None:
        """Return limits that split the largest micro-batch of these rows in two; None if each is a single row."""
        several = [group for group in self.split(rows) if len(group) > 1]
        if not several:
            return None
        if self.max_tokens is None:
            return replace(self, max_rows=max(map(len, several)) // 2)
        return replace(self, max_tokens=max(1, max(self._cost([rows[i] for i in group]) for group in several) // 2))

    def split(self, rows: Sequence[RowSize]) -> list[list[int]]:
        """Return the row indices of each micro-batch.

        Without a token budget rows stay in order. With one, they are sorted by length, so that the rows of a
        micro-batch have similar lengths and fewer micro-batches are needed; packed rows of the same prompt stay
        together.
        """
        groups: list[list[int]] = []
        for row in self._order(rows):
            if not groups or not self._fits([rows[i] for i in [*groups[-1], row]]):
                groups.append([])
            groups[-1].append(row)
        return groups

    def _order(self, rows: Sequence[RowSize]) -> list[int]:
        order = list(range(len(rows)))
        if self.max_tokens is None:
            return order
        order.sort(key=lambda i: -rows[i].tokens)
        if self.packed:
            rank = {prompt: i for i, prompt in enumerate(dict.fromkeys(rows[i].prompt for i in order))}
            order.sort(key=lambda i: rank[rows[i].prompt])
        return order

    def _fits(self, rows: list[RowSize]) -> bool:
        within_rows = self.max_rows is None or len(rows) <= self.max_rows
        return within_rows and (self.max_tokens is None or self._cost(rows) <= self.max_tokens)

    def _cost(self, rows: list[RowSize]) -> int:
        """Return the tokens of a micro-batch."""
        if self.packed:
            prompts = {row.prompt: row.prompt_tokens for row in rows}
            return sum(prompts.values()) + sum(row.response_tokens for row in rows)
        return max(row.tokens for row in rows) * len(rows)


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


def mini_batches(mask: Tensor, plan: UpdatePlan, step: int, episode: Tensor | None = None) -> list[MiniBatch]:
    """Return the mini-batches of an update, in order.

    Args:
        mask: [B, T] elements to train on; rows without any are omitted.
        plan: the number of epochs and the rows of a mini-batch.
        step: training step, counted from 0.
        episode: [B] the episode of each row; rows of an episode are in the same mini-batch and count as one row of
            `plan`. None: every row is an episode.
    """
    (learned,) = mask.any(dim=-1).nonzero(as_tuple=True)
    episodes = learned if episode is None else episode[learned].unique()
    minis = []
    for epoch in range(plan.epochs):
        for number, drawn in enumerate(plan.mini_batches(len(episodes), step, epoch)):
            rows = episodes[drawn]
            if episode is not None:
                rows = torch.cat([learned[episode[learned] == one] for one in rows])
            valid = count_valid(mask[rows])
            sizes = LossSizes(int(valid.num_tokens), int(valid.num_sequences))
            minis.append(MiniBatch(epoch, number, rows, torch.arange(len(rows)), sizes))
    return minis


def divide(
    minis: Sequence[MiniBatch], costs: Sequence[float], ranks: int, assign: Assign
) -> list[tuple[Tensor, list[MiniBatch]]]:
    """Divide each mini-batch among ranks.

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
    """Assign rows to ranks in order, the same number to each."""
    return [rows.tolist() for rows in torch.arange(len(costs)).tensor_split(ranks)]


def balance_metrics(
    minis: Sequence[MiniBatch],
    shares: Sequence[tuple[Tensor, list[MiniBatch]]],
    tokens: Sequence[int],
    costs: Sequence[float],
) -> dict[str, float]:
    """Return metrics of the balance over ranks: tokens per rank in a pass over the batch, and their costs."""
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
    """Return the total cost of the rows of each mini-batch of the first pass, as [ranks][mini-batches]."""
    return [
        [sum(costs[row] for row in rows[mini.rows].tolist()) for mini in minis if mini.epoch == 0]
        for rows, minis in shares
    ]


def balanced(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign rows to ranks so that their costs are about equal; each rank's rows ascend.

    This is the largest differencing method (Karmarkar and Karp 1982): repeatedly merge the two divisions with the
    largest difference between heaviest and lightest rank, heaviest with lightest, until one division is left.
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


Experts = Literal["chosen", "recorded", "replayed"]
"""How experts are chosen: by the routers; by the routers, and recorded; or replayed from `RolloutBatch.routed_experts`,
where it has any."""


@dataclass(frozen=True)
class TokenRows:
    """The inputs of one forward pass, and the indices that map its outputs back to the batch."""

    input_ids: Tensor  # [R, S]
    position_ids: Tensor  # [R, S]
    layout: AttentionLayout
    predicts: Tensor  # [M] flat position in R*S just before each valid response token
    targets: Tensor  # [M] those response tokens
    slots: Tensor  # [M] flat position of each target in B*T; the first one if several rows share the token
    source: Tensor  # [B*T] index of the response token in M, -1 where the mask is not set
    ends: Tensor  # [B] flat position in R*S of the last token of each row
    shape: tuple[int, int]  # (B, T)
    ranks: SequenceRanks | None = None
    """The ranks that split the tokens, if any; `predicts`, `targets` and `slots` then cover this rank's tokens, and
    `ends` is -1 for ends on other ranks."""
    tokens: Tensor | None = (
        None  # [B, W] flat position in R*S of a row's tokens, prompt and response; -1: on another rank
    )
    experts: Tensor | None = None  # [R*S, L, k] experts of the tokens, see `RolloutBatch.routed_experts`

    def scatter(self, per_token: Tensor) -> Tensor:
        """Scatter [M] to [B, T] over all ranks, zero outside the mask; differentiable."""
        padded = torch.cat([per_token, per_token.new_zeros(1)])
        local = padded.index_select(0, self.source.where(self.source >= 0, len(per_token))).view(self.shape)
        return local if self.ranks is None else self.ranks.sum(local)

    def by_row(self, experts: Tensor) -> Tensor:
        """Arrange experts [R*S, L, k] by row, [B, W, L, k], over all ranks, with -1 beyond the end of a row."""
        assert self.tokens is not None
        local = torch.where((self.tokens >= 0)[..., None, None], experts[self.tokens.clamp(min=0)], -1)
        return local if self.ranks is None else self.ranks.max(local)

    def shared(self, ranks: SequenceRanks) -> TokenRows:
        """Return this rank's slice of packed rows."""
        tokens = self.input_ids.shape[1]
        return self.select(torch.arange(*ranks.span(tokens)), Shared(self.layout, tokens, ranks), ranks)

    def select(self, indices: Tensor, layout: AttentionLayout, ranks: SequenceRanks) -> TokenRows:
        """Return the tokens of packed rows that are on one rank.

        Args:
            indices: [n] indices of the rank's tokens among all tokens; indices beyond the last token are padding.
            layout: the layout of the rank's tokens.
            ranks: the ranks that split the rows.
        """
        tokens = self.input_ids.shape[1]
        inside = indices < tokens
        local_index = torch.full((tokens,), -1)
        local_index[indices[inside]] = torch.arange(len(indices))[inside]
        predicts = local_index[self.predicts]
        is_local = predicts >= 0
        local_token = torch.cat([torch.where(is_local, is_local.cumsum(0) - 1, -1), torch.tensor([-1])])
        indices = indices.where(inside, 0)
        return TokenRows(
            input_ids=self.input_ids[:, indices].where(inside, 0),
            position_ids=self.position_ids[:, indices].where(inside, 0),
            layout=layout,
            predicts=predicts[is_local],
            targets=self.targets[is_local],
            slots=self.slots[is_local],
            source=local_token[self.source],
            ends=local_index[self.ends],
            shape=self.shape,
            ranks=ranks,
            tokens=None if self.tokens is None else torch.where(self.tokens >= 0, local_index[self.tokens], -1),
            experts=None if self.experts is None else self.experts[indices].where(inside[:, None, None], -1),
        )


def sequence_lengths(batch: RolloutBatch) -> Tensor:
    """Return [B], the total length of prompt and response of each row."""
    return batch.prompt_length + batch.response_length


def row_sizes(batch: RolloutBatch) -> list[RowSize]:
    """Return the size of each row, for the cost of a micro-batch."""
    columns = (batch.uid, batch.prompt_length, batch.response_length)
    return [RowSize(*size) for size in zip(*(column.tolist() for column in columns), strict=True)]


def padding_row() -> TrainBatch:
    """Return a row of two tokens that is not trained on, for a rank that has fewer micro-batches than others."""
    one, none = torch.ones(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    row = RolloutBatch(
        uid=one,
        prompt_ids=none,
        prompt_length=one,
        response_ids=none,
        response_length=one,
        response_mask=none.bool(),
        rollout_log_probs=none.float(),
        truncated=one == 0,
        batch_size=[1],
    )
    return TrainBatch.assemble(row, torch.zeros(1))


def token_rows(
    batch: TrainBatch,
    *,
    packed: bool,
    ranks: SequenceRanks | None = None,
    experts: Experts = "chosen",
    merges: bool = True,
) -> TokenRows:
    """Convert rows into the model's inputs on the CPU, or into one rank's slice of them.

    With `packed` (``use_remove_padding``) there is no padding, and rows with the same prompt share it, so the layers
    compute it once. Identical responses to it are shared too, unless recorded truncations or experts are replayed,
    which may differ, or `merges` is False: the losses of a mixture's routers count tokens, and would depend on which
    responses are in the same micro-batch.
    """
    merges = merges and packed and batch.kept is None and experts != "replayed"
    input_ids, position_ids, layout, prompt_start, response_start = (
        _packed(batch, merges=merges) if packed else _padded(batch)
    )
    row, column = batch.response_mask.nonzero(as_tuple=True)
    rows, width = batch.response_mask.shape
    after_prompt = prompt_start + batch.prompt_length - 1
    after_last = response_start + batch.response_length - 1
    predicts = torch.where(column == 0, after_prompt[row], response_start[row] + column - 1)
    targets, slots = batch.response_ids[row, column], row * width + column
    first, number = _distinct(predicts, targets) if merges else (torch.arange(len(slots)),) * 2
    all_rows = TokenRows(
        input_ids=input_ids,
        position_ids=position_ids,
        layout=layout,
        predicts=predicts[first],
        targets=targets[first],
        slots=slots[first],
        source=torch.full((rows * width,), -1).scatter(0, slots, number),
        ends=torch.where(batch.response_length == 0, after_prompt, after_last),
        shape=(rows, width),
    )
    if experts != "chosen":
        tokens = _tokens(batch, prompt_start, response_start)
        replayed = None
        if experts == "replayed" and batch.routed_experts is not None:
            replayed = _by_token(batch.routed_experts, tokens, input_ids.numel())
        all_rows = replace(all_rows, tokens=tokens, experts=replayed)
    assert packed or ranks is None, "ranks share packed rows only"
    return all_rows if ranks is None else all_rows.shared(ranks)


def _tokens(batch: TrainBatch, prompt_start: Tensor, response_start: Tensor) -> Tensor:
    """Return `TokenRows.tokens` [B, W]."""
    position = torch.arange(batch.prompt_ids.shape[1] + batch.response_ids.shape[1])
    prompt, length = batch.prompt_length[:, None], sequence_lengths(batch)[:, None]
    tokens = torch.where(
        position < prompt, prompt_start[:, None] + position, response_start[:, None] + position - prompt
    )
    return tokens.where(position < length, -1)


def _by_token(routed: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Arrange experts [B, W, L, k] by token, [count, L, k]; the experts of a shared token are those of its first
    row."""
    at = tokens.flatten()
    positions = (at >= 0).nonzero().flatten()
    owner = torch.full((count,), len(at)).scatter_reduce(0, at[positions], positions, "amin")
    has_owner = owner < len(at)
    by_token = routed.flatten(0, 1)[owner.where(has_owner, 0)]
    return by_token.where(has_owner[:, None, None], -1)


def _distinct(predicts: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Deduplicate (predicts, targets) pairs: return the index of the first occurrence of each distinct pair, ascending,
    and for each pair its position in that list."""
    different, number = ((predicts << 32) + targets).unique(return_inverse=True)
    index = torch.arange(len(predicts))
    first, order = torch.full(different.shape, len(predicts)).scatter_reduce(0, number, index, "amin").sort()
    return first, order.argsort()[number]


def _packed(batch: TrainBatch, *, merges: bool) -> tuple[Tensor, Tensor, AttentionLayout, Tensor, Tensor]:
    """Return tokens, positions, layout, and where each row's prompt and response start."""
    sequences: list[Tensor] = []
    after: list[int | None] = []
    uid, prompt_length, response_length = (
        column.tolist() for column in (batch.uid, batch.prompt_length, batch.response_length)
    )
    rows_of: dict[int, list[int]] = {}
    for row, prompt in enumerate(uid):
        rows_of.setdefault(prompt, []).append(row)
    prompt_sequence, response_sequence = torch.zeros(2, len(uid), dtype=torch.int64)
    for rows in rows_of.values():
        prompt_sequence[rows] = shared = len(sequences)
        sequences.append(batch.prompt_ids[rows[0], : prompt_length[rows[0]]])
        after.append(None)
        sequence_of: dict[bytes | int, int] = {}
        for row in rows:
            response = batch.response_ids[row, : response_length[row]]
            response_sequence[row] = sequence_of.setdefault(
                response.numpy().tobytes() if merges else row, len(sequences)
            )
            if response_sequence[row] == len(sequences):
                sequences.append(response)
                after.append(shared)
    layout = Packed(tuple(map(len, sequences)), tuple(after))
    start = torch.tensor([0, *layout.lengths]).cumsum(0)
    return torch.cat(sequences)[None], layout.position_ids(), layout, start[prompt_sequence], start[response_sequence]


def _padded(batch: TrainBatch) -> tuple[Tensor, Tensor, AttentionLayout, Tensor, Tensor]:
    """Return the same as `_packed`, with one row of the model's input for each row of the batch."""
    length = sequence_lengths(batch)[:, None]
    position = torch.arange(int(length.max())).expand(len(batch), -1)
    # In the model's input a response starts at the end of its prompt, in the batch at the end of the widest prompt.
    gap = batch.prompt_ids.shape[1] - batch.prompt_length[:, None]
    column = torch.where(position < batch.prompt_length[:, None], position, position + gap)
    inside = position < length
    tokens = torch.cat([batch.prompt_ids, batch.response_ids], dim=1)
    input_ids = tokens.gather(1, column.where(inside, 0)).where(inside, 0)
    start = torch.arange(len(batch)) * position.shape[1]
    return input_ids, position.where(inside, 0), Padded(), start, start + batch.prompt_length
