"""Conversion of a batch of rows into the token tensors that a model reads, packed or padded.

The head gets only the positions that predict a token under `response_mask`, so prompts, padding and tokens that the
policy did not sample never reach the vocabulary projection. Packed rows share their prompt, and also equal responses:
many short answers to a prompt cost little more than the different ones among them.

Legend: B rows, T response width, R x S the model's input (1 x N packed), M = valid response tokens, without those that
equal responses share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tether.batch import RolloutBatch, TrainBatch
from tether.kernels import AttentionLayout
from tether.text.learning.micro_batches import RowSize
from tether.text.models.layers import Packed, Padded, SequenceRanks, Shared

Experts = Literal["chosen", "recorded", "replayed"]
"""How the experts of a mixture are chosen: by the routers; by the routers, and recorded; or replayed from
`RolloutBatch.routed_experts` if it has any."""


@dataclass(frozen=True)
class TokenRows:
    """The inputs of one forward pass, and the indices that map its outputs back to the batch."""

    input_ids: Tensor  # [R, S]
    position_ids: Tensor  # [R, S]
    layout: AttentionLayout
    predicts: Tensor  # [M] flat position in R*S just before each valid response token
    targets: Tensor  # [M] those response tokens
    slots: Tensor  # [M] their flat position in B*T, the first one for a token of several rows
    source: Tensor  # [B*T] index of the response token in M, -1 where the mask is not set
    ends: Tensor  # [B] flat position in R*S of the last token of each row
    shape: tuple[int, int]  # (B, T)
    ranks: SequenceRanks | None = None
    """The ranks that split the tokens, if any; `predicts`, `targets` and `slots` are then those of this rank's tokens,
    and -1 stands for ends on other ranks."""
    tokens: Tensor | None = (
        None  # [B, W] flat position in R*S of a row's tokens, prompt and response; -1: on another rank
    )
    experts: Tensor | None = None  # [R*S, L, k] that the tokens are sent to, see `RolloutBatch.routed_experts`

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
        """Return the tokens of packed rows that one rank has.

        Args:
            indices: [n] of the rank's tokens among all tokens; those beyond the last are padding.
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
    """Return [B], the prompt and response tokens of each row."""
    return batch.prompt_length + batch.response_length


def row_sizes(batch: RolloutBatch) -> list[RowSize]:
    """Return the tokens that each row adds to a micro-batch."""
    columns = (batch.uid, batch.prompt_length, batch.response_length)
    return [RowSize(*size) for size in zip(*(column.tolist() for column in columns), strict=True)]


def padding_row() -> TrainBatch:
    """Return a row of two tokens that is not trained on, for a rank that waits for the micro-batches of others."""
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
    compute it once. Equal responses to it are shared too, unless the sampler's record of their tokens is replayed, or
    `merges` is False: the losses of a mixture's routers count tokens, and would depend on which responses share a
    micro-batch.
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
    """Return [B, W], the `TokenRows.tokens`."""
    position = torch.arange(batch.prompt_ids.shape[1] + batch.response_ids.shape[1])
    prompt, length = batch.prompt_length[:, None], sequence_lengths(batch)[:, None]
    tokens = torch.where(
        position < prompt, prompt_start[:, None] + position, response_start[:, None] + position - prompt
    )
    return tokens.where(position < length, -1)


def _by_token(routed: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Arrange experts [B, W, L, k] by token, [count, L, k], taking a shared token's from its first row."""
    at = tokens.flatten()
    positions = (at >= 0).nonzero().flatten()
    owner = torch.full((count,), len(at)).scatter_reduce(0, at[positions], positions, "amin")
    has_owner = owner < len(at)
    by_token = routed.flatten(0, 1)[owner.where(has_owner, 0)]
    return by_token.where(has_owner[:, None, None], -1)


def _distinct(predicts: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of each different pair's first occurrence, ascending, and the number of each pair's in that."""
    different, number = ((predicts << 32) + targets).unique(return_inverse=True)
    index = torch.arange(len(predicts))
    first, order = torch.full(different.shape, len(predicts)).scatter_reduce(0, number, index, "amin").sort()
    return first, order.argsort()[number]


def _packed(batch: TrainBatch, *, merges: bool) -> tuple[Tensor, Tensor, AttentionLayout, Tensor, Tensor]:
    """Return tokens, positions, layout, and where each row's prompt and response start.

    Args:
        batch: the rows.
        merges: shares equal responses to a prompt.
    """
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
    # In the input a response begins where its prompt ends, in the batch where the widest prompt ends.
    gap = batch.prompt_ids.shape[1] - batch.prompt_length[:, None]
    column = torch.where(position < batch.prompt_length[:, None], position, position + gap)
    inside = position < length
    tokens = torch.cat([batch.prompt_ids, batch.response_ids], dim=1)
    input_ids = tokens.gather(1, column.where(inside, 0)).where(inside, 0)
    start = torch.arange(len(batch)) * position.shape[1]
    return input_ids, position.where(inside, 0), Padded(), start, start + batch.prompt_length
