"""The process of one device: what a factory built there, and its methods by name."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tether.runtime.machine import set_threads

COLLECTIVE_SECONDS = 600.0
"""How long a rank waits for the others."""
BEAT_SECONDS = 0.5
"""Between two signs of life."""


class Group(Protocol):
    """Ranks with the same parts."""

    size: int

    def call(self, part: str, method: str, arguments: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """Call a method of a part on every rank at once.

        Args:
            part: name that the factory gave it.
            method: its method.
            arguments: of each rank; None: this rank is not called, and its answer is None.

        Returns:
            The answers, in the order of ranks.

        Raises:
            RankFailed: see there.
        """
        ...

    def share(self, value: Any) -> Any:
        """Store a large argument once for all ranks; stands in its place in `call`."""
        ...


class Worker:
    """One rank.

    Args:
        rank: its number.
        threads: CPU threads.
        log: file for what it prints; its time of change is the rank's last sign of life.
    """

    def __init__(self, rank: int, threads: int, log: Path) -> None:
        self._rank = rank
        self._parts: Mapping[str, Any] = {}
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, sys.stdout.fileno())
        os.dup2(descriptor, sys.stderr.fileno())
        faulthandler.enable()
        set_threads(threads)
        threading.Thread(target=_beat, args=(descriptor,), daemon=True).start()

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def address(self) -> str:
        """Where rank 0 waits for the others."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def join(self, address: str, ranks: int, device: str) -> None:
        """Wait for the other ranks at the address of rank 0."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            init_method=address,
            rank=self._rank,
            world_size=ranks,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        if device == "cuda":
            torch.cuda.set_device(0)  # Ray shows each rank its own device alone

    def build(self, factory: Callable[..., Mapping[str, Any]], arguments: tuple[Any, ...]) -> None:
        """Have a factory make the parts."""
        self._parts = factory(*arguments)

    def call(self, part: str, method: str, *arguments: Any) -> Any:
        """Call a method of a part."""
        return getattr(self._parts[part], method)(*arguments)


def _beat(descriptor: int) -> None:
    while True:
        os.utime(descriptor)
        time.sleep(BEAT_SECONDS)
