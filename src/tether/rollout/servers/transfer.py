"""Weights on their way to a server, some at a time: in files that lie in memory, or in one buffer that is kept."""

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


_ALIGNED = 64  # bytes: a line of a cache
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Staged:
    """Some weights, which lie in a buffer."""

    buffer: dict[str, object]
    """The handle by which another process of this user opens it, as JSON."""
    tensors: list[tuple[str, str, list[int], int]]
    """Name, number format, shape, and first byte in the buffer."""
    content: Tensor
    """[bytes] all of it."""
    last: bool
    """Nothing will be written over it before all is done."""


class Staging:
    """A buffer that a server's workers open once: new memory would cost as much as a copy, for each page of it.

    It lies in the memory of this machine, without a name that could stay behind, or in that of a GPU.
    """

    def __init__(self) -> None:
        self._bytes: Tensor | None = None
        self._handle: dict[str, object] = {}
        self._release: Callable[[], object] | None = None

    def fill(
        self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, limit: int, device: torch.device
    ) -> Iterator[Staged]:
        """Lay tensors in it, in this format, at most `limit` bytes at a time or one that is larger.

        What is yielded must have been read when the next is asked for.
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
            buffer = self._room(max(limit, end), device)
            buffer[begin:end].view(kind).view(value.shape).copy_(value.detach())
            placed.append((name, str(kind).removeprefix("torch."), list(value.shape), begin))
        if placed:
            yield self._staged(placed, end, last=True)

    def close(self) -> None:
        """Give its memory back; what workers have open stays theirs until they open another one."""
        if self._release is not None:
            self._release()
        self._bytes, self._release = None, None

    def _staged(self, placed: list[tuple[str, str, list[int], int]], end: int, *, last: bool) -> Staged:
        assert self._bytes is not None
        if self._bytes.is_cuda:
            torch.cuda.synchronize(self._bytes.device)
        return Staged(self._handle, placed, self._bytes[:end], last)

    def _room(self, size: int, device: torch.device) -> Tensor:
        """All of it; another one where it is too small, which is never so while something lies in it."""
        if self._bytes is None or len(self._bytes) < size or self._bytes.device != device:
            self.close()
            name = f"tether-{uuid.uuid4().hex}"  # which tells it from another one under the same number
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
    """That of this process."""
    return torch.device("cuda", torch.cuda.current_device())


def gpu_of(device: torch.device) -> str:
    """A GPU's own name, whatever its number in this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _memory_of(tensor: Tensor) -> list[object]:
    """The arguments of `rebuild_cuda_tensor` that describe its storage, as JSON."""
    _, (_, _, _, offset, _, _, _, handle, size, begins, _, *counter_and_event) = reduce_tensor(tensor)
    assert offset == 0
    counter, counter_offset, event, waits = counter_and_event
    words = [base64.b64encode(part).decode() for part in (handle, counter, event)]
    return [words[0], size, begins, words[1], counter_offset, words[2], waits]


@dataclass(frozen=True)
class Outgoing:
    """Weights for a server, which travel once."""

    tensors: Iterable[tuple[str, Tensor]]
    dtype: torch.dtype
    """That the server computes in."""
    limit: int
    """Bytes at a time."""
    staging: Staging
    """Of the server."""

    def parts(self, device: torch.device = CPU) -> Iterator[dict[str, Tensor]]:
        """See `buckets`."""
        return buckets(self.tensors, self.dtype, self.limit, device)

    def staged(self, device_for: Callable[[torch.device], torch.device] = lambda _: CPU) -> Iterator[Staged]:
        """See `Staging.fill`.

        Args:
            device_for: tells the buffer's device, given that of the weights.
        """
        tensors = iter(self.tensors)
        for first in tensors:
            device = device_for(first[1].device)
            yield from self.staging.fill(chain([first], tensors), self.dtype, self.limit, device)


@contextmanager
def shared_file(tensors: dict[str, Tensor]) -> Iterator[str]:
    """A safetensors file in memory that other processes of this user can read; nothing is left of it afterwards."""
    descriptor = os.memfd_create("tether-weights")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            _write(tensors, file)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _write(tensors: dict[str, Tensor], file: IO[bytes]) -> None:
    """Write contiguous tensors as safetensors does, but without the two copies that its `save` makes before.

    The format, https://github.com/huggingface/safetensors: length of the header, header, tensors without gaps.
    """
    aligned = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header, size = dict[str, object](), 0
    for name, value in aligned:
        place = [size, size := size + value.nbytes]
        header[name] = {"dtype": _FORMATS[value.dtype], "shape": list(value.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, value in aligned:
        file.write(value.view(-1).view(torch.uint8).numpy().data)


def buckets(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, limit: int, device: torch.device = CPU
) -> Iterator[dict[str, Tensor]]:
    """The tensors in this format on a device, at most `limit` bytes at a time or one that is larger."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, value in tensors:
        moved = value.detach().to(device, dtype if value.is_floating_point() else None).contiguous()
        if part and size + moved.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = moved
        size += moved.nbytes
    if part:
        yield part
