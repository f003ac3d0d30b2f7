"""The experts that the tokens of a call of `generate` were routed to, for replay in training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.text.models.expert_choice import ExpertChoice, check_choice, follow_choice, recorded_choice

TokenSpan = tuple[Sequence[int], int, int]
"""Rows that share a span of tokens, the position where it starts, and its length."""


class ExpertRecorder:
    """Records the experts of each forward pass of a call. Positions are relative to the first token of a row's prompt.

    Args:
        model: the sampling model.
        rows: number of rows of the call.
        width: maximum number of tokens of a row.

    Raises:
        ValueError: the model has no routers that tether supports.
    """

    def __init__(self, model: PreTrainedModel, rows: int, width: int) -> None:
        follow_choice(model)
        self._model, self._rows, self._width = model, rows, width
        self._choice = ExpertChoice(records=True)
        self._seen: Tensor | None = None  # [rows, width, L, k], the index of each expert plus one

    def begin(self) -> ExpertChoice:
        """Prepare for the next forward pass."""
        self._choice = ExpertChoice(records=True)
        return self._choice

    def add_tokens(self, rows: Tensor, positions: Tensor) -> None:
        """Record the last pass, which had one token of each of these rows."""
        seen, experts = self._last()
        seen[rows.cpu(), positions.cpu()] = experts

    def add_spans(self, spans: Sequence[TokenSpan]) -> None:
        """Record the last pass, which had the tokens of these spans, concatenated."""
        seen, last = self._last()
        by_span = last.split([length for _, _, length in spans])
        for (rows, first, length), experts in zip(spans, by_span, strict=True):
            seen[list(rows), first : first + length] = experts

    def _last(self) -> tuple[Tensor, Tensor]:
        """Return the tensor of all records, and the experts [N, L, k] of the last pass."""
        check_choice(self._model, self._choice)
        last = recorded_choice(self._model, self._choice).cpu() + 1
        if self._seen is None:  # pages of zeros use no memory before they are written to
            self._seen = torch.zeros(self._rows, self._width, *last.shape[1:], dtype=last.dtype)
        return self._seen, last

    def result(self, width: int) -> Tensor:
        """Return [B, width, L, k] for `tether.batch.RolloutBatch.routed_experts`."""
        assert self._seen is not None
        missing = max(width - self._width, 0)
        seen = self._seen[:, :width] - 1
        return torch.nn.functional.pad(seen, (0, 0, 0, 0, 0, missing), value=-1)
