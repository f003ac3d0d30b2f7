"""The process of one device: what a factory built there, and its methods by name."""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from tether import __version__
from tether.execution.transfers import Transfers
from tether.execution.weights import StoredWeights, in_parts
from tether.runtime.machine import set_threads
from tether.runtime.rendezvous import StoreAddress

BEAT_SECONDS = 0.5
"""Between two signs of life."""
GETS_ADDRESS = 0x8915  # of an interface: SIOCGIFADDR


class Group(Protocol):
    """Ranks with the same parts, which know each other."""

    @property
    def size(self) -> int:
        """How many."""
        ...

    @property
    def transfers(self) -> Transfers:
        """Bytes and seconds of transfers to them and back."""
        ...

    def build(self, factory: Callable[..., Mapping[str, Any]], *arguments: Any) -> None:
        """Have a factory, which is named by its module, make the parts on every rank."""
        ...

    def call(self, part: str, method: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
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

    def share(self, value: object) -> object:
        """Store a large argument once for all ranks; stands in its place in `call`."""
        ...

    def share_weights(self, part: str) -> Iterator[object]:
        """Have the first rank store the weights of an engine, some at a time, for ranks of any group.

        Each item stands in the place of a `StoredWeights` in `call`. The next one is stored while it is used, and it is
        freed once nobody has it; the engine must stay as it is until the last.
        """
        ...

    def read(self, shared: object) -> Any:
        """The object that `share` or `share_weights` has stored."""
        ...


@dataclass(frozen=True)
class Process:
    """Where a rank runs, and on which versions."""

    pid: int
    machine: str
    """Processes with the same one have numbers of each other."""
    host: str
    versions: Mapping[str, str]


def this_process() -> Process:
    """The one that asks."""
    machine = socket.gethostname()
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(
            Path("/proc/self/ns/pid").readlink()
        )
    versions = {"tether": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return Process(os.getpid(), machine, socket.gethostname(), versions)


class Worker:
    """One rank.

    Args:
        rank: its number.
        threads: CPU threads.
        log: file that it adds what it prints to, stacks on SIGUSR1 among it.
        folder: that relative paths begin at.
        store: the driver's, where ranks meet and give signs of life.
    """

    def __init__(self, rank: int, threads: int, log: Path, folder: Path, store: StoreAddress) -> None:
        self._rank, self._address = rank, store
        self._parts: Mapping[str, Any] = {}
        self._left: Iterator[tuple[list[tuple[str, Tensor]], bool]] = iter(())
        self._doing, self._since = "starts", time.time()
        with suppress(OSError):  # a folder of another machine
            os.chdir(folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, sys.stdout.fileno())
        os.dup2(descriptor, sys.stderr.fileno())
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        set_threads(threads)
        beats = self._address.connect()  # of its own: that of the main thread may wait for others
        threading.Thread(target=self._beat, args=(beats,), daemon=True).start()

    def process(self) -> Process:
        """This one."""
        return this_process()

    def join(self, ranks: range, device: str, seconds: float) -> None:
        """Wait for the ranks that work together with this one, now and in each collective so many seconds."""
        _use_interface_to(self._address.host)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=dist.PrefixStore(f"ranks from {ranks.start}", self._address.connect()),
            rank=self._rank - ranks.start,
            world_size=len(ranks),
            timeout=timedelta(seconds=seconds),
        )
        if device == "cuda":
            torch.cuda.set_device(0)  # Ray shows each rank its own device alone

    def build(self, factory: Callable[..., Mapping[str, Any]], arguments: tuple[object, ...]) -> None:
        """Have a factory make the parts."""
        self._doing, self._since = "build", time.time()
        self._parts = factory(*arguments)
        self._doing, self._since = "waits", time.time()

    def call(self, part: str, method: str, *arguments: object) -> Any:
        """Call a method of a part."""
        return self._do(f"{part}.{method}", lambda: getattr(self._parts[part], method)(*arguments))

    def next_weights(self, part: str, begin: bool) -> tuple[StoredWeights | None, bool]:
        """Some of the weights of an engine, from its first ones on or those that come next; and whether there are more.

        All ranks of the engine take part; the first has the weights.
        """
        if begin:
            self._left = in_parts(self._parts[part].whole_weights())
        weights, more = self._do(f"{part}.whole_weights", lambda: next(self._left))
        return StoredWeights.of(weights) if dist.get_rank() == 0 else None, more

    def _do(self, name: str, work: Callable[[], Any]) -> Any:
        self._doing, self._since = name, time.time()
        with record_function(name):
            answer = work()
        self._doing, self._since = "waits", time.time()
        return answer

    def _beat(self, store: dist.TCPStore) -> None:
        number, key = 0, f"rank {self._rank}"
        try:
            while True:
                number += 1
                device = torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
                host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # peak
                sign = {"beat": number, "doing": self._doing, "since": self._since, "host": host, "device": device}
                signed = self._address.signed(key, json.dumps(sign).encode())
                # Never a question, for which it would wait.
                store.set(key, signed)  # type: ignore[arg-type]  # bytes are taken, too
                time.sleep(BEAT_SECONDS)
        except dist.DistError:  # the driver is gone; Ray would see it later, and this process must not write any more
            os._exit(1)


def _use_interface_to(host: str) -> None:
    """Let Gloo talk by the network interface that leads to a host; else it takes what this host's name stands for,
    which often is a loopback.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        mine = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), GETS_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == mine:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                    return
