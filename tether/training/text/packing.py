"""From a batch of rows to the token tensors that a model reads, packed end to end or padded to a rectangle.

Only the positions that predict a token under `response_mask` are kept for the head: prompts, padding and tokens that
the policy did not sample never reach the vocabulary projection.

Legend: B rows, T response width, R x S the model's input (1 x N packed), M = valid response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tether.batch import TrainBatch
from tether.kernels.attention_spec import AttentionLayout
from tether.models.layers.attention import Packed, Padded
from tether.training.text.micro_batches import RowSize


@dataclass(frozen=True)
class TokenRows:
    """What one forward pass reads, and where its outputs belong."""

    input_ids: Tensor  # [R, S]
    position_ids: Tensor  # [R, S]
    layout: AttentionLayout
    predicts: Tensor  # [M] flat position in R*S that stands just before each valid response token
    targets: Tensor  # [M] those response tokens
    slots: Tensor  # [M] their flat place in B*T
    ends: Tensor  # [B] flat position in R*S of the last token of each row
    shape: tuple[int, int]  # (B, T)

    def scatter(self, per_token: Tensor) -> Tensor:
        """[M] -> [B, T], zero where the mask is not set; differentiable."""
        rows, width = self.shape
        return per_token.new_zeros(rows * width).scatter(0, self.slots, per_token).view(rows, width)


def sequence_lengths(batch: TrainBatch) -> Tensor:
    """[B] prompt and response tokens of each row."""
    return batch.prompt_length + batch.response_length


def row_sizes(batch: TrainBatch) -> list[RowSize]:
    """What each row costs a micro-batch; rows have the same prompt where all its tokens agree."""
    number: dict[tuple[int, ...], int] = {}
    lengths = batch.prompt_length.tolist()
    keys = [tuple(ids[:length]) for ids, length in zip(batch.prompt_ids.tolist(), lengths, strict=True)]
    prompts = [number.setdefault(key, len(number)) for key in keys]
    return [RowSize(*size) for size in zip(prompts, lengths, batch.response_length.tolist(), strict=True)]


def token_rows(batch: TrainBatch, *, packed: bool) -> TokenRows:
    """Lay the rows out for the model.

    With `packed` (``use_remove_padding``) no position goes into padding, and a prompt that several rows begin with
    stands once, before their responses: so many rows cost the layers a single prompt.
    """
    input_ids, position_ids, layout, prompt_start, response_start = _packed(batch) if packed else _padded(batch)
    row, column = batch.response_mask.nonzero(as_tuple=True)
    rows, width = batch.response_mask.shape
    after_prompt = prompt_start + batch.prompt_length - 1
    after_last = response_start + batch.response_length - 1
    return TokenRows(
        input_ids=input_ids,
        position_ids=position_ids,
        layout=layout,
        predicts=torch.where(column == 0, after_prompt[row], response_start[row] + column - 1),
        targets=batch.response_ids[row, column],
        slots=row * width + column,
        ends=torch.where(batch.response_length == 0, after_prompt, after_last),
        shape=(rows, width),
    )


def _packed(batch: TrainBatch) -> tuple[Tensor, Tensor, AttentionLayout, Tensor, Tensor]:
    """Tokens, positions, layout, and where each row's prompt and response start."""
    sizes = row_sizes(batch)
    pieces: list[Tensor] = []
    after: list[int | None] = []
    piece_of_prompt: dict[int, int] = {}
    piece_of_row = [0] * len(sizes)
    for row in sorted(range(len(sizes)), key=lambda row: sizes[row].prompt):
        size = sizes[row]
        if size.prompt not in piece_of_prompt:
            piece_of_prompt[size.prompt] = len(pieces)
            pieces.append(batch.prompt_ids[row, : size.prompt_tokens])
            after.append(None)
        piece_of_row[row] = len(pieces)
        pieces.append(batch.response_ids[row, : size.response_tokens])
        after.append(piece_of_prompt[size.prompt])
    layout = Packed(tuple(map(len, pieces)), tuple(after))
    device = batch.prompt_ids.device
    start = torch.tensor([0, *layout.lengths], device=device).cumsum(0)
    prompt_start = start[[piece_of_prompt[size.prompt] for size in sizes]]
    return torch.cat(pieces)[None], layout.position_ids(device), layout, prompt_start, start[piece_of_row]


def _padded(batch: TrainBatch) -> tuple[Tensor, Tensor, AttentionLayout, Tensor, Tensor]:
    """As `_packed`, one row of the model's input for each of the batch."""
    sequences = [
        torch.cat([prompt[: size.prompt_tokens], response[: size.response_tokens]])
        for prompt, response, size in zip(batch.prompt_ids, batch.response_ids, row_sizes(batch), strict=True)
    ]
    device = batch.prompt_ids.device
    input_ids = pad_sequence(sequences, batch_first=True)
    position_ids = pad_sequence([torch.arange(len(s), device=device) for s in sequences], batch_first=True)
    start = torch.arange(len(sequences), device=device) * input_ids.shape[1]
    return input_ids, position_ids, Padded(), start, start + batch.prompt_length
