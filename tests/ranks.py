"""Processes of one process group that do a piece of work of a test."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.forks import forking

Work = Callable[..., Any]
Result = TypeVar("Result")


def on_ranks(folder: Path, ranks: int, work: Work, *arguments: Any, answers: int = 0) -> Any:
    """The result of `work` on a rank (`answers`) of a group of new processes."""
    folder.mkdir(parents=True, exist_ok=True)
    forking()
    mp.start_processes(_rank, (ranks, folder, work, arguments, answers), nprocs=ranks, start_method="forkserver")
    return torch.load(folder / "found.pt", weights_only=False)


def of_first(work: Callable[[], Result]) -> Result:
    """The result of the first rank, on every rank: all would compute the same, on fewer cores than ranks."""
    found = [work() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]  # type: ignore[return-value]


def _rank(rank: int, ranks: int, folder: Path, work: Work, arguments: tuple[Any, ...], answers: int) -> None:
    faulthandler.enable()  # where a rank aborts, its stacks are in the output of the test
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
    found = work(*arguments)
    if rank == answers:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()
