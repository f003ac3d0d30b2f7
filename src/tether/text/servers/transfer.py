"""Sends weights to a server in chunks: as files in memory, or in one shared buffer."""

from __future__ import annotations

import base64
import json
import mmap
import os
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import IO

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

_FORMATS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


_ALIGNED = 64  # bytes of a cache line
CPU = torch.device("cpu")


@dataclass(frozen=True)
class StagedChunk:
    """A chunk of weights in a buffer."""

    buffer: dict[str, object]
    """The handle with which another process of this user can open the buffer, as JSON."""
    tensors: list[tuple[str, str, list[int], int]]
    """Name, dtype, shape, and offset in the buffer."""
    content: Tensor
    """[bytes] content of the chunk."""
    last: bool
    """Whether the buffer will not be overwritten before the end of the update."""


class Staging:
    """A buffer that a server's workers open only once, because the page faults of new memory would cost as much as a
    copy.

    It is anonymous memory of this machine, so that nothing is left behind, or memory of a GPU.
    """

    def __init__(self) -> None:
        self._bytes: Tensor | None = None
        self._handle: dict[str, object] = {}
        self._release: Callable[[], object] | None = None

    def fill(
        self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, limit: int, device: torch.device
    ) -> Iterator[StagedChunk]:
        """Copy tensors to the buffer in this dtype and yield chunks of at most `limit` bytes, or of one larger tensor.

        A chunk must have been read before the next one is requested.
        """
        placed = list[tuple[str, str, list[int], int]]()
        end = 0
        for name, value in tensors:
            kind = dtype if value.is_floating_point() else value.dtype
            begin, size = -(-end // _ALIGNED) * _ALIGNED, value.numel() * kind.itemsize
            if placed and begin + size > limit:
                yield self._staged(placed, end, last=False)
                placed, begin = [], 0
            end = begin + size
            buffer = self._buffer_of(max(limit, end), device)
            buffer[begin:end].view(kind).view(value.shape).copy_(value.detach())
            placed.append((name, str(kind).removeprefix("torch."), list(value.shape), begin))
        if placed:
            yield self._staged(placed, end, last=True)

    def close(self) -> None:
        """Release the memory; workers keep their mapping until they open another buffer."""
        if self._release is not None:
            self._release()
        self._bytes, self._release = None, None

    def _staged(self, placed: list[tuple[str, str, list[int], int]], end: int, *, last: bool) -> StagedChunk:
        assert self._bytes is not None
        if self._bytes.is_cuda:
            torch.cuda.synchronize(self._bytes.device)
        return StagedChunk(self._handle, placed, self._bytes[:end], last)

    def _buffer_of(self, size: int, device: torch.device) -> Tensor:
        """Return the buffer, reallocated if it is too small; this never happens while it has content."""
        if self._bytes is None or len(self._bytes) < size or self._bytes.device != device:
            self.close()
            name = f"tether-{uuid.uuid4().hex}"  # distinguishes it from a later buffer with the same descriptor
            if device.type == "cuda":
                self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
                self._handle = {"name": name, "size": size, "gpu": gpu_of(device), "memory": _memory_of(self._bytes)}
            else:
                descriptor = os.memfd_create(name)
                self._release = weakref.finalize(self, os.close, descriptor)
                os.ftruncate(descriptor, size)
                self._bytes = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
                self._handle = {"name": name, "size": size, "path": f"/proc/{os.getpid()}/fd/{descriptor}"}
        return self._bytes


def this_gpu() -> torch.device:
    """Return the GPU of this process."""
    return torch.device("cuda", torch.cuda.current_device())


def gpu_of(device: torch.device) -> str:
    """Return the unique id of a GPU, which does not depend on its index in this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _memory_of(tensor: Tensor) -> list[object]:
    """Return the arguments of `rebuild_cuda_tensor` that describe the tensor's storage, as JSON."""
    _, (_, _, _, offset, _, _, _, handle, size, begins, _, *counter_and_event) = reduce_tensor(tensor)
    assert offset == 0
    counter, counter_offset, event, waits = counter_and_event
    words = [base64.b64encode(field).decode() for field in (handle, counter, event)]
    return [words[0], size, begins, words[1], counter_offset, words[2], waits]


@dataclass(frozen=True)
class WeightPayload:
    """Weights to send to a server; they can be iterated once."""

    tensors: Iterable[tuple[str, Tensor]]
    dtype: torch.dtype
    """The dtype that the server computes in."""
    limit: int
    """Bytes per chunk."""
    staging: Staging
    """The server's buffer."""

    def chunks(self, device: torch.device = CPU) -> Iterator[dict[str, Tensor]]:
        """Yield chunks as `buckets` does."""
        return buckets(self.tensors, self.dtype, self.limit, device)

    def staged(self, device_for: Callable[[torch.device], torch.device] = lambda _: CPU) -> Iterator[StagedChunk]:
        """Yield chunks in the buffer as `Staging.fill` does.

        Args:
            device_for: returns the buffer's device for the device of the weights.
        """
        tensors = iter(self.tensors)
        for first in tensors:
            device = device_for(first[1].device)
            yield from self.staging.fill(chain([first], tensors), self.dtype, self.limit, device)


@contextmanager
def shared_file(tensors: dict[str, Tensor]) -> Iterator[str]:
    """Create a safetensors file in memory that other processes of this user can read, and delete it afterwards."""
    descriptor = os.memfd_create("tether-weights")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            _write(tensors, file)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _write(tensors: dict[str, Tensor], file: IO[bytes]) -> None:
    """Write contiguous tensors as safetensors does, without the two copies that its `save` makes.

    The format, https://github.com/huggingface/safetensors: length of the header, header, tensors without gaps.
    """
    aligned = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header, size = dict[str, object](), 0
    for name, value in aligned:
        offsets = [size, size := size + value.nbytes]
        header[name] = {"dtype": _FORMATS[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, value in aligned:
        file.write(value.view(-1).view(torch.uint8).numpy().data)


def buckets(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, limit: int, device: torch.device = CPU
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in this dtype on a device, in chunks of at most `limit` bytes, or of one larger tensor."""
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, value in tensors:
        converted = value.detach().to(device, dtype if value.is_floating_point() else None).contiguous()
        if chunk and size + converted.nbytes > limit:
            yield chunk
            chunk, size = {}, 0
        chunk[name] = converted
        size += converted.nbytes
    if chunk:
        yield chunk
