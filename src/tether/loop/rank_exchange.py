"""A rank's work besides updates: exchanging objects with other ranks, and writing its share of a checkpoint."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")


def gather_objects(value: Value) -> list[Value]:
    """Gather the value of each rank, in order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pickled(value))
    return [pickle.loads(data) for data in gathered]


def pickled(value: object) -> bytes:
    """Pickle a value for `pickle.loads`, storing only the elements of CPU tensors.

    By default a tensor is pickled as a `torch.save` file with its entire storage, which for the metrics of a
    micro-batch takes ten times as long and ten times as many bytes.
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


class BackgroundWriter:
    """Runs one job at a time in a thread; errors of writing files are returned, since the rank can continue."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._job: Future[None] | None = None

    def begin(self, job: Callable[[], None]) -> None:
        self._job = self._thread.submit(job)

    def answer(self) -> tuple[bool, BaseException | None]:
        """Return whether the job is done, and its error if it failed."""
        if self._job is None or not self._job.done():
            return self._job is None, None
        return True, self._job.exception()
