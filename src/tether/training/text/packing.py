"""From a batch of rows to the token tensors that a model reads, packed end to end or padded to a rectangle.

Only the positions that predict a token under `response_mask` are kept for the head: prompts, padding and tokens that
the policy did not sample never reach the vocabulary projection. Packed rows of one prompt share it, and rows with the
same response share that too: many short answers to a prompt cost little more than the different ones among them.

Legend: B rows, T response width, R x S the model's input (1 x N packed), M = valid response tokens, without those that
a token before them stands for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tether.batch import RolloutBatch, TrainBatch
from tether.kernels import AttentionLayout
from tether.models.layers import Packed, Padded, SequenceRanks, Shared
from tether.training.text.micro_batches import RowSize

Experts = Literal["chosen", "recorded", "replayed"]
"""The experts of a mixture that tokens go to: those that the routers choose; these, and they are told; those of
`RolloutBatch.routed_experts`, where it has any."""


@dataclass(frozen=True)
class TokenRows:
    """The inputs of one forward pass, and where its outputs belong."""

    input_ids: Tensor  # [R, S]
    position_ids: Tensor  # [R, S]
    layout: AttentionLayout
    predicts: Tensor  # [M] flat position in R*S that stands just before each valid response token
    targets: Tensor  # [M] those response tokens
    slots: Tensor  # [M] their flat place in B*T; of a token of several rows, the first
    source: Tensor  # [B*T] index of the response token in M, -1 where the mask is not set
    ends: Tensor  # [B] flat position in R*S of the last token of each row
    shape: tuple[int, int]  # (B, T)
    ranks: SequenceRanks | None = None
    """Which share the tokens, if any; `predicts`, `targets` and `slots` then are those of the tokens on this rank, and
    an end that is elsewhere is -1."""
    tokens: Tensor | None = None  # [B, W] flat position in R*S of a row's tokens, prompt and response; -1: not here
    experts: Tensor | None = None  # [R*S, L, k] that the tokens are sent to, see `RolloutBatch.routed_experts`

    def scatter(self, per_token: Tensor) -> Tensor:
        """[M] -> [B, T], of all ranks, zero where the mask is not set; differentiable."""
        here = torch.cat([per_token, per_token.new_zeros(1)])
        here = here.index_select(0, self.source.where(self.source >= 0, len(per_token))).view(self.shape)
        return here if self.ranks is None else self.ranks.sum(here)

    def by_row(self, experts: Tensor) -> Tensor:
        """[R*S, L, k] -> [B, W, L, k], of all ranks, -1 beyond the end of a row."""
        assert self.tokens is not None
        here = torch.where((self.tokens >= 0)[..., None, None], experts[self.tokens.clamp(min=0)], -1)
        return here if self.ranks is None else self.ranks.max(here)

    def shared(self, ranks: SequenceRanks) -> TokenRows:
        """This rank's slice of packed rows."""
        tokens = self.input_ids.shape[1]
        return self.part(torch.arange(*ranks.span(tokens)), Shared(self.layout, tokens, ranks), ranks)

    def part(self, places: Tensor, layout: AttentionLayout, ranks: SequenceRanks) -> TokenRows:
        """The tokens of packed rows that one rank has.

        Args:
            places: [n] of its tokens among all of them; those beyond the last are padding.
            layout: of its tokens.
            ranks: which share the rows.
        """
        tokens = self.input_ids.shape[1]
        inside = places < tokens
        place_here = torch.full((tokens,), -1)
        place_here[places[inside]] = torch.arange(len(places))[inside]
        predicts = place_here[self.predicts]
        here = predicts >= 0
        token_here = torch.cat([torch.where(here, here.cumsum(0) - 1, -1), torch.tensor([-1])])
        places = places.where(inside, 0)
        return TokenRows(
            input_ids=self.input_ids[:, places].where(inside, 0),
            position_ids=self.position_ids[:, places].where(inside, 0),
            layout=layout,
            predicts=predicts[here],
            targets=self.targets[here],
            slots=self.slots[here],
            source=token_here[self.source],
            ends=place_here[self.ends],
            shape=self.shape,
            ranks=ranks,
            tokens=None if self.tokens is None else torch.where(self.tokens >= 0, place_here[self.tokens], -1),
            experts=None if self.experts is None else self.experts[places].where(inside[:, None, None], -1),
        )


def sequence_lengths(batch: RolloutBatch) -> Tensor:
    """[B] prompt and response tokens of each row."""
    return batch.prompt_length + batch.response_length


def row_sizes(batch: RolloutBatch) -> list[RowSize]:
    """The tokens that each row adds to a micro-batch."""
    columns = (batch.uid, batch.prompt_length, batch.response_length)
    return [RowSize(*size) for size in zip(*(column.tolist() for column in columns), strict=True)]


def padding_row() -> TrainBatch:
    """A row of two tokens that nothing is learned from, for a rank that waits for the micro-batches of the others."""
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
    """Lay the rows out for the model, where the batch lies: in the memory of the host; a slice of them for a rank.

    With `packed` (``use_remove_padding``) no position goes into padding, and a prompt that several rows begin with
    stands once, before their responses: so many rows cost the layers a single prompt. Equal responses to it stand once
    too, unless the sampler recorded something about each of their tokens that is replayed, or `merges` is False: a loss
    of a mixture's routers counts tokens, and would depend on which responses share a micro-batch.
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
    rows_here = TokenRows(
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
        rows_here = replace(rows_here, tokens=tokens, experts=replayed)
    assert packed or ranks is None, "ranks share packed rows only"
    return rows_here if ranks is None else rows_here.shared(ranks)


def _tokens(batch: TrainBatch, prompt_start: Tensor, response_start: Tensor) -> Tensor:
    """[B, W], see `TokenRows.tokens`."""
    position = torch.arange(batch.prompt_ids.shape[1] + batch.response_ids.shape[1])
    prompt, length = batch.prompt_length[:, None], sequence_lengths(batch)[:, None]
    tokens = torch.where(
        position < prompt, prompt_start[:, None] + position, response_start[:, None] + position - prompt
    )
    return tokens.where(position < length, -1)


def _by_token(routed: Tensor, tokens: Tensor, count: int) -> Tensor:
    """[B, W, L, k] -> [count, L, k]; a token that several rows share goes where it went in the first of them."""
    at = tokens.flatten()
    here = (at >= 0).nonzero().flatten()
    owner = torch.full((count,), len(at)).scatter_reduce(0, at[here], here, "amin")
    known = owner < len(at)
    by_token = routed.flatten(0, 1)[owner.where(known, 0)]
    return by_token.where(known[:, None, None], -1)


def _distinct(predicts: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of each different pair's first occurrence, ascending, and the number of each pair's in that."""
    different, number = ((predicts << 32) + targets).unique(return_inverse=True)
    index = torch.arange(len(predicts))
    first, order = torch.full(different.shape, len(predicts)).scatter_reduce(0, number, index, "amin").sort()
    return first, order.argsort()[number]


def _packed(batch: TrainBatch, *, merges: bool) -> tuple[Tensor, Tensor, AttentionLayout, Tensor, Tensor]:
    """Tokens, positions, layout, and where each row's prompt and response start.

    Args:
        batch: the rows.
        merges: equal responses to a prompt stand once.
    """
    pieces: list[Tensor] = []
    after: list[int | None] = []
    uid, prompt_length, response_length = (
        column.tolist() for column in (batch.uid, batch.prompt_length, batch.response_length)
    )
    rows_of: dict[int, list[int]] = {}
    for row, prompt in enumerate(uid):
        rows_of.setdefault(prompt, []).append(row)
    prompt_piece, response_piece = torch.zeros(2, len(uid), dtype=torch.int64)
    for rows in rows_of.values():
        prompt_piece[rows] = shared = len(pieces)
        pieces.append(batch.prompt_ids[rows[0], : prompt_length[rows[0]]])
        after.append(None)
        piece_of: dict[bytes | int, int] = {}
        for row in rows:
            response = batch.response_ids[row, : response_length[row]]
            response_piece[row] = piece_of.setdefault(response.numpy().tobytes() if merges else row, len(pieces))
            if response_piece[row] == len(pieces):
                pieces.append(response)
                after.append(shared)
    layout = Packed(tuple(map(len, pieces)), tuple(after))
    start = torch.tensor([0, *layout.lengths]).cumsum(0)
    return torch.cat(pieces)[None], layout.position_ids(), layout, start[prompt_piece], start[response_piece]


def _padded(batch: TrainBatch) -> tuple[Tensor, Tensor, AttentionLayout, Tensor, Tensor]:
    """As `_packed`, one row of the model's input for each of the batch."""
    length = sequence_lengths(batch)[:, None]
    position = torch.arange(int(length.max())).expand(len(batch), -1)
    # A response begins where the prompt ends, in the batch at the end of the widest prompt.
    gap = batch.prompt_ids.shape[1] - batch.prompt_length[:, None]
    column = torch.where(position < batch.prompt_length[:, None], position, position + gap)
    inside = position < length
    tokens = torch.cat([batch.prompt_ids, batch.response_ids], dim=1)
    input_ids = tokens.gather(1, column.where(inside, 0)).where(inside, 0)
    start = torch.arange(len(batch)) * position.shape[1]
    return input_ids, position.where(inside, 0), Padded(), start, start + batch.prompt_length
