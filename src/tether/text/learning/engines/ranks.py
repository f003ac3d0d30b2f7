"""The common base of engines on several ranks, where each rank trains on its share of a mini-batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.algorithms import Metric
from tether.batch import TrainBatch
from tether.loop.engine import LossSpec, MicroBatchTooLarge, OutOfMemory, Outputs, explain_out_of_memory
from tether.loop.rank_exchange import gather_objects
from tether.text.learning.engines.copies import with_weights
from tether.text.learning.engines.local import TOO_LONG, AutogradEngine, SkippedMiniBatch
from tether.text.learning.packing import MicroBatching, MiniBatch, RowSize

Value = TypeVar("Value")


class RanksEngine(AutogradEngine[Outputs]):
    """The engine of one of several ranks; every method is collective."""

    output_ranks: Sequence[int]
    """For each group of ranks with the same rows, the rank that returns the model's outputs."""

    _empty: PreTrainedModel
    """The model without its weights."""

    def check_saving(self, folder: Path) -> None:
        """Write the model without its weights; called on one rank."""
        assert self._save, "a frozen model is not saved"
        parameters = list(self._empty.parameters())
        adapts = not all(p.requires_grad for p in parameters)  # adapters are also written separately
        weights = (torch.zeros(p.shape) if adapts and p.requires_grad else p for p in parameters)
        self._save(with_weights(self._empty, weights), folder)

    @abstractmethod
    def whole_model(self) -> PreTrainedModel | None:
        """Return a copy with the weights that the optimizer updates, on the CPU of rank 0; None on the other ranks."""

    def _rounds(self, count: int) -> int:
        return max(gather_objects(count))

    def _retry_if_out_of_memory(
        self, attempt: Callable[[MicroBatching], Value], micro: MicroBatching, rows: Sequence[RowSize]
    ) -> Value:
        return run_or_report_too_large(attempt, micro, rows)

    def _reduce_over_ranks(
        self, measured: list[dict[str, Metric]], shares: dict[str, Tensor]
    ) -> tuple[list[dict[str, Metric]], dict[str, Tensor]]:
        every = self._from_groups((measured, shares))
        totals: dict[str, Tensor] = {}
        for name, share in chain.from_iterable(of_rank.items() for _, of_rank in every):
            totals[name] = totals.get(name, 0.0) + share
        return list(chain.from_iterable(of_rank for of_rank, _ in every)), totals

    def _prepared(
        self, mini: TrainBatch, loss: LossSpec[TrainBatch, Outputs], share: MiniBatch, draws: torch.Generator
    ) -> TrainBatch:
        assert loss.prepare
        outputs = self._infer(mini, loss.forward, self.micro)
        shares = [one for one in self._from_groups((share.positions, mini, outputs)) if len(one[0])]
        gathered = _merge([(positions, rows) for positions, rows, _ in shares])
        loss.prepare(gathered, _merge([(positions, values) for positions, _, values in shares]), draws)
        rows: TrainBatch = gathered[share.positions]
        return rows

    def _keep_incident(
        self, step: int, mini: TrainBatch, loss: LossSpec[TrainBatch, Outputs], share: MiniBatch
    ) -> None:
        model = self.whole_model()
        shares = [one for one in self._from_groups((share.positions, mini)) if len(one[0])]
        if model is not None:
            rows = _merge(shares)
            self._incidents.keep(step, model, SkippedMiniBatch(model, self.reference, rows, loss))

    def _from_groups(self, value: Value) -> list[Value]:
        """Gather one value from each group of ranks with the same rows."""
        every = gather_objects(value)
        return [every[rank] for rank in self.output_ranks]


def run_or_report_too_large(
    attempt: Callable[[MicroBatching], Value], micro: MicroBatching, rows: Sequence[RowSize]
) -> Value:
    """Run an attempt with micro-batches of these limits.

    Raises:
        MicroBatchTooLarge: they do not fit into memory, and smaller ones might.
        OutOfMemory: they do not fit into memory, and each is already a single row.
    """
    where, smaller = f"a forward or backward pass with {micro}", micro.halved(rows)
    try:
        with explain_out_of_memory(where, f"Lower {micro.key}. {TOO_LONG}"):
            return attempt(micro)
    except OutOfMemory as error:
        if smaller is None:
            raise
        raise MicroBatchTooLarge(str(error), smaller.setting) from None


def _merge(shares: Sequence[tuple[Tensor, Any]]) -> Any:
    """Merge the shares of a mini-batch into its order of rows."""
    order = torch.cat([positions for positions, _ in shares]).argsort()
    return torch.cat([rows for _, rows in shares])[order]
