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
from tether.models.attention import AttentionLayout, Packed, Padded


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


def token_rows(batch: TrainBatch, *, packed: bool) -> TokenRows:
    """Lay the rows out for the model; `packed` (``use_remove_padding``) wastes no position on padding."""
    sequences = [
        torch.cat([prompt[:p], response[:r]])
        for prompt, p, response, r in zip(
            batch.prompt_ids,
            batch.prompt_length.tolist(),
            batch.response_ids,
            batch.response_length.tolist(),
            strict=True,
        )
    ]
    lengths = [len(s) for s in sequences]
    positions = [torch.arange(n, device=batch.prompt_ids.device) for n in lengths]
    row, column = batch.response_mask.nonzero(as_tuple=True)
    within = batch.prompt_length[row] + column - 1
    rows, width = batch.response_mask.shape
    if packed:
        start = torch.tensor([0, *lengths[:-1]], device=row.device).cumsum(0)
        input_ids, position_ids = torch.cat(sequences)[None], torch.cat(positions)[None]
        layout: AttentionLayout = Packed(tuple(lengths))
    else:
        start = torch.arange(rows, device=row.device) * max(lengths)
        input_ids = pad_sequence(sequences, batch_first=True)
        position_ids = pad_sequence(positions, batch_first=True)
        layout = Padded()
    return TokenRows(
        input_ids=input_ids,
        position_ids=position_ids,
        layout=layout,
        predicts=start[row] + within,
        targets=batch.response_ids[row, column],
        slots=row * width + column,
        ends=start + sequence_lengths(batch) - 1,
        shape=(rows, width),
    )
