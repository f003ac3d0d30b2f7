"""The parts that test_ray_group.py has built on each rank."""

import os
import time
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from tether.execution import StoredWeights


class Part:
    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
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

    def whole_weights(self) -> list[tuple[str, Tensor]]:
        tied = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
        return [("a", tied), ("b", tied), ("c", torch.ones(1, 1)), ("none", torch.empty(0, 3))]

    def total(self, weights: StoredWeights) -> float:
        assert weights.nbytes == 8
        tensors = dict(weights.update(1).tensors)
        assert tensors["none"].shape == (0, 3)
        return sum(float(tensor.sum()) for tensor in tensors.values())

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def hang(self) -> None:
        dist.barrier()


def make() -> dict[str, Any]:
    return {"part": Part()}
