"""The experts that the tokens of a call of `generate` went to, for training to replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.models.language.expert_choice import ExpertChoice, check_choice, follow_choice, recorded_choice

Piece = tuple[Sequence[int], int, int]
"""Rows that share some tokens, the position of the first of these, and their number."""


class ExpertRecorder:
    """Sees each forward pass of a call. Positions count from the first token of a row's prompt.

    Args:
        model: that samples.
        rows: of the call.
        width: most tokens of a row.

    Raises:
        ValueError: the model has no routers that tether knows.
    """

    def __init__(self, model: PreTrainedModel, rows: int, width: int) -> None:
        follow_choice(model)
        self._model, self._rows, self._width = model, rows, width
        self._choice = ExpertChoice(records=True)
        self._seen: Tensor | None = None  # [rows, width, L, k], one more than the number of each expert

    def begin(self) -> ExpertChoice:
        """For the next forward pass."""
        self._choice = ExpertChoice(records=True)
        return self._choice

    def add_tokens(self, rows: Tensor, positions: Tensor) -> None:
        """The last pass had one token of each of these rows."""
        seen, experts = self._last()
        seen[rows.cpu(), positions.cpu()] = experts

    def add_pieces(self, pieces: Sequence[Piece]) -> None:
        """The last pass had these pieces, end to end."""
        seen, found = self._last()
        of_pieces = found.split([length for _, _, length in pieces])
        for (rows, first, length), experts in zip(pieces, of_pieces, strict=True):
            seen[list(rows), first : first + length] = experts

    def _last(self) -> tuple[Tensor, Tensor]:
        """All that was seen, and [N, L, k] of the last pass."""
        check_choice(self._model, self._choice)
        found = recorded_choice(self._model, self._choice).cpu() + 1
        if self._seen is None:  # memory that is zero is not there before it is written to
            self._seen = torch.zeros(self._rows, self._width, *found.shape[1:], dtype=found.dtype)
        return self._seen, found

    def result(self, width: int) -> Tensor:
        """[B, width, L, k], see `tether.batch.RolloutBatch.routed_experts`."""
        assert self._seen is not None
        missing = max(width - self._width, 0)
        seen = self._seen[:, :width] - 1
        return torch.nn.functional.pad(seen, (0, 0, 0, 0, 0, missing), value=-1)
