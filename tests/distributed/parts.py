"""The parts that test_ray_group.py has built on each rank."""

import importlib.util
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tether.distributed import Group, StoredWeights

NEEDS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")

LARGE = 12 << 20
"""Numbers in a tensor: a part of the weights has two of them."""


class Part:
    def __init__(self) -> None:
        self._rows: list[int] = []
        self._given = 0

    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def threads(self) -> tuple[int, str]:
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    def summed(self, value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value

    def refuse(self, why: str) -> None:
        raise ValueError(why)

    def divide(self, value: float) -> float:
        return value / 0

    def speak(self, line: str) -> None:
        print(line, flush=True)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        tied = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
        small = [("a", tied), ("b", tied), ("c", torch.ones(1, 1)), ("none", torch.empty(0, 3))]
        yield from small
        numbers = torch.arange(LARGE, dtype=torch.float32)
        for number, rows in enumerate(self._rows, 1):
            self._given = number
            yield f"large {rows}", (numbers + rows).view(rows, -1)

    def given(self) -> int:
        """How many large tensors were asked for."""
        return self._given

    def have(self, rows: list[int]) -> None:
        self._rows = rows

    def total(self, weights: StoredWeights) -> float:
        assert weights.nbytes == 8
        tensors = dict(weights.update(1).tensors)
        assert tensors["none"].shape == (0, 3)
        return sum(float(tensor.sum()) for tensor in tensors.values())

    def found(self, weights: StoredWeights) -> list[tuple[str, tuple[int, ...], int]]:
        """Name, shape and checksum of each."""
        return described(weights.update(1).tensors)

    def described(self) -> list[tuple[str, tuple[int, ...], int]]:
        return described(self.whole_weights())

    def named_memory(self) -> list[str]:
        """Files in shared memory that are mapped here and have a name, so that they might be left there."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")]

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def hang(self) -> None:
        dist.barrier()


def described(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, tuple[int, ...], int]]:
    return [
        (name, tuple(tensor.shape), zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy()))
        for name, tensor in tensors
    ]


def ray_group(*arguments: Any, **options: Any) -> Group:
    """Start ranks by Ray, which takes a second to import: only where a test needs it."""
    from tether.distributed.ray_group import RayGroup

    return RayGroup(*arguments, **options)


def two_nodes() -> Iterator[Any]:
    """Yield a cluster of two raylets on this machine, with one CPU each, for a fixture."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(num_cpus=1, include_dashboard=False)
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


def make() -> dict[str, Any]:
    return {"part": Part()}
