"""Weights on their way to a server on this machine: in files that lie in memory, some at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from safetensors.torch import save
from torch import Tensor


@contextmanager
def shared_file(tensors: dict[str, Tensor]) -> Iterator[str]:
    """A safetensors file in memory that other processes of this user can read; nothing is left of it afterwards."""
    descriptor = os.memfd_create("tether-weights")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(save(tensors))
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


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
