"""What test_ray_group.py has built on each rank."""

import os
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor


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

    def speak(self, line: str) -> None:
        print(line, flush=True)

    def hang(self) -> None:
        dist.barrier()


def make() -> dict[str, Any]:
    return {"part": Part()}
