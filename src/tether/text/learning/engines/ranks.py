"""The common base of engines on several ranks, where each rank trains on its share of a mini-batch."""

from __future__ import annotations

import io
import pickle
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from tether.algorithms import Metric
from tether.batch import TrainBatch
from tether.loop.engines.out_of_memory import MicroBatchTooLarge, OutOfMemory, named_out_of_memory
from tether.loop.engines.protocol import LossSpec, Outputs
from tether.text.learning.engines.autograd import TOO_LONG, AutogradEngine, SkippedMiniBatch
from tether.text.learning.engines.copies import with_weights
from tether.text.learning.engines.division import MiniBatch
from tether.text.learning.micro_batches import MicroBatching, RowSize

Found = TypeVar("Found")


class RanksEngine(AutogradEngine[Outputs]):
    """An engine of one of several ranks; every method is collective."""

    speakers: Sequence[int]
    """For each group of ranks with the same rows, the rank that has the model's outputs."""

    _empty: PreTrainedModel
    """The model without its weights."""

    def check_saving(self, folder: Path) -> None:
        """Write the model without its weights; called on one rank."""
        assert self._save, "a frozen model is not saved"
        parameters = list(self._empty.parameters())
        adapts = not all(p.requires_grad for p in parameters)  # adapters are written by themselves, too
        weights = (torch.zeros(p.shape) if adapts and p.requires_grad else p for p in parameters)
        self._save(with_weights(self._empty, weights), folder)

    @abstractmethod
    def whole_model(self) -> PreTrainedModel | None:
        """Return a copy with the weights that the optimizer updates on the CPU of rank 0, and None on the other
        ranks."""

    def _rounds(self, count: int) -> int:
        return max(from_all(count))

    def _within_memory(
        self, attempt: Callable[[MicroBatching], Found], micro: MicroBatching, rows: Sequence[RowSize]
    ) -> Found:
        return or_smaller_next_time(attempt, micro, rows)

    def _of_all(
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

    def _from_groups(self, value: Found) -> list[Found]:
        """Gather the value of each group of ranks with the same rows."""
        every = from_all(value)
        return [every[rank] for rank in self.speakers]


def or_smaller_next_time(
    attempt: Callable[[MicroBatching], Found], micro: MicroBatching, rows: Sequence[RowSize]
) -> Found:
    """Run an attempt in micro-batches of these limits.

    Raises:
        MicroBatchTooLarge: they do not fit, and smaller ones might.
        OutOfMemory: they do not fit, and each is a single row.
    """
    where, smaller = f"a forward or backward pass with {micro}", micro.halved(rows)
    try:
        with named_out_of_memory(where, f"Lower {micro.key}. {TOO_LONG}"):
            return attempt(micro)
    except OutOfMemory as error:
        if smaller is None:
            raise
        raise MicroBatchTooLarge(str(error), smaller.setting) from None


def from_all(value: Found) -> list[Found]:
    """Gather the value of each rank, in order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pickled(value))
    return [pickle.loads(data) for data in gathered]


def pickled(value: object) -> bytes:
    """Pickle a value for `pickle.loads`, storing only the elements of CPU tensors.

    By default a tensor is pickled as a file of `torch.save`, with all of its storage, which takes ten times the time
    and the bytes for the metrics of a micro-batch.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        if value.layout is not torch.strided or value.is_quantized:
            return NotImplemented
        numbers = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (numbers, value.dtype, tuple(value.shape))


def _tensor(numbers: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not numbers:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(numbers), dtype=dtype).view(shape)


def _merge(shares: Sequence[tuple[Tensor, Any]]) -> Any:
    """Merge the rows of shares of a mini-batch in the mini-batch's order."""
    order = torch.cat([positions for positions, _ in shares]).argsort()
    return torch.cat([rows for _, rows in shares])[order]
