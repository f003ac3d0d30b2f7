"""Weights on their way to a server on this machine: in files that lie in memory, some at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO

import torch
from torch import Tensor

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


def buckets(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, limit: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in this format on the host, at most `limit` bytes at a time or one that is larger."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, value in tensors:
        moved = value.detach().to("cpu", dtype if value.is_floating_point() else None).contiguous()
        if part and size + moved.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = moved
        size += moved.nbytes
    if part:
        yield part
