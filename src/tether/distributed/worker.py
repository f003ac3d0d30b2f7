"""The process of one rank, whose components a factory builds and whose methods are called by name."""

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
from tether.distributed.transfers import Transfers
from tether.distributed.weights import StoredWeights, weight_chunks
from tether.loop.parts import Ranks
from tether.runtime.machine import set_threads
from tether.runtime.rendezvous import StoreAddress

BEAT_SECONDS = 0.5
"""Seconds between two heartbeats."""
GETS_ADDRESS = 0x8915  # of an interface: SIOCGIFADDR


class Group(Ranks, Protocol):
    """Ranks that have the same components and one process group."""

    @property
    def transfers(self) -> Transfers:
        """Return the counter of bytes and seconds of transfers to and from the ranks."""
        ...

    def build(self, factory: Callable[..., Mapping[str, Any]], *arguments: Any) -> None:
        """Build the components on every rank with a factory that ranks can import."""
        ...

    def share(self, value: object) -> object:
        """Store a large argument once for all ranks, and return a reference to pass to `call` instead."""
        ...

    def share_weights(self, component: str) -> Iterator[object]:
        """Store the weights of an engine in chunks, from its first rank, for ranks of any group.

        Each reference that is yielded is passed to `call` instead of a `StoredWeights`. The next chunk is stored while
        this one is used, and a chunk is freed with its last reference. The engine must not change before the last one.
        """
        ...

    def read(self, shared: object) -> Any:
        """Return the object that `share` or `share_weights` stored."""
        ...


class CompanionLost(Exception):
    """The process of a companion died, or does not answer; its node may be fine."""


class NodeLost(CompanionLost):
    """The node of a companion is gone, and the ranks do without it."""


class Companion(Protocol):
    """An object in a process of its own on the node of a rank; several threads may call it at once."""

    host: str
    """Name of its node."""

    def start(self) -> None:
        """Start the process unless it runs; it is not waited for."""
        ...

    def call(self, method: str, *arguments: object, timeout: float) -> Any:
        """Return the result of a method.

        Args:
            method: name of the method.
            arguments: positional arguments; what `Group.share_weights` yields arrives as a `StoredWeights`.
            timeout: maximum seconds.

        Raises:
            Exception: the error of the method.
            CompanionLost: the process is gone, or the timeout expired.
            NodeLost: the node is gone; `RankLost`: the ranks cannot do without it.
        """
        ...

    def work(self, method: str, *arguments: object) -> Any:
        """Return the result of a method that takes as long as it takes, without making a `call` wait."""
        ...

    def cut(self) -> None:
        """Make the pending `work` of all threads raise `CompanionLost`."""
        ...

    def close(self) -> None:
        """End the process and all that it started."""
        ...


class AllRanks(Group, Protocol):
    """All ranks of a run, with their processes."""

    @property
    def processes(self) -> Sequence[Process]: ...

    def do_without(self, ranks: range) -> None:
        """Continue when ranks without components are lost with their nodes."""
        ...

    def companion(self, rank: int, threads: int, factory: Callable[..., Any], *arguments: object) -> Companion:
        """Return a companion on the node of a rank, which ends with the ranks.

        Args:
            rank: the rank.
            threads: maximum number of methods that `Companion.work` executes at once.
            factory: a function that the node can import; it makes the object.
            arguments: arguments of the factory.
        """
        ...


@dataclass(frozen=True)
class Process:
    """Describes the process of a rank and its versions."""

    pid: int
    machine: str
    """Identifies the machine and its PID namespace; processes with equal values can signal each other by pid."""
    host: str
    versions: Mapping[str, str]
    node: str = ""
    """ID of its node in the cluster."""
    devices: str = ""
    """Its devices as ``CUDA_VISIBLE_DEVICES`` names them."""


def this_process() -> Process:
    """Return the description of the current process."""
    machine = socket.gethostname()
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(
            Path("/proc/self/ns/pid").readlink()
        )
    versions = {"tether": __version__, "torch": torch.__version__, "python": platform.python_version()}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return Process(os.getpid(), machine, socket.gethostname(), versions, devices=devices)


class Worker:
    """Hosts the components of one rank.

    Args:
        rank: its index.
        threads: CPU threads.
        log: file to which its output is appended, including stacks on SIGUSR1.
        folder: working directory.
        store: address of the driver's store, for the rendezvous and heartbeats of ranks.
    """

    def __init__(self, rank: int, threads: int, log: Path, folder: Path, store: StoreAddress) -> None:
        self._rank, self._address = rank, store
        self._components: Mapping[str, Any] = {}
        self._chunks: Iterator[tuple[list[tuple[str, Tensor]], bool]] = iter(())
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
        beats = self._address.connect()  # a separate connection: the main thread's may block
        threading.Thread(target=self._beat, args=(beats,), daemon=True).start()

    def process(self) -> Process:
        return this_process()

    def join(self, ranks: range, device: str, timeout: float) -> None:
        """Create the process group with these ranks; `timeout` applies to this call and to each collective."""
        _use_interface_to(self._address.host)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=dist.PrefixStore(f"ranks from {ranks.start}", self._address.connect()),
            rank=self._rank - ranks.start,
            world_size=len(ranks),
            timeout=timedelta(seconds=timeout),
        )
        if device == "cuda":
            torch.cuda.set_device(0)  # Ray shows each rank its own device alone

    def build(self, factory: Callable[..., Mapping[str, Any]], arguments: tuple[object, ...]) -> None:
        self._doing, self._since = "build", time.time()
        self._components = factory(*arguments)
        self._doing, self._since = "waits", time.time()

    def call(self, component: str, method: str, *arguments: object) -> Any:
        return self._do(f"{component}.{method}", lambda: getattr(self._components[component], method)(*arguments))

    def next_weights(self, component: str, begin: bool) -> tuple[StoredWeights | None, bool]:
        """Return the first or the next chunk of an engine's weights, and whether there are more.

        All ranks of the engine must call it; only the first one gets the weights.
        """
        if begin:
            self._chunks = weight_chunks(self._components[component].whole_weights())
        weights, more = self._do(f"{component}.whole_weights", lambda: next(self._chunks))
        return StoredWeights.of(weights) if dist.get_rank() == 0 else None, more

    def _do(self, name: str, work: Callable[[], Any]) -> Any:
        self._doing, self._since = name, time.time()
        with record_function(name):
            result = work()
        self._doing, self._since = "waits", time.time()
        return result

    def _beat(self, store: dist.TCPStore) -> None:
        count, key = 0, f"rank {self._rank}"
        try:
            while True:
                count += 1
                device = torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
                host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # peak
                heartbeat = {"beat": count, "doing": self._doing, "since": self._since, "host": host, "device": device}
                signed = self._address.signed(key, json.dumps(heartbeat).encode())
                # Only ever write: a read would wait.
                store.set(key, signed)  # type: ignore[arg-type]  # it accepts bytes too
                time.sleep(BEAT_SECONDS)
        except dist.DistError:  # the driver is gone, which Ray would notice later; this process must not write any more
            os._exit(1)


def _use_interface_to(host: str) -> None:
    """Make Gloo use the network interface that routes to a host.

    By default it uses the address that this host's name resolves to, which often is a loopback.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        own_address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = fcntl.ioctl(probe.fileno(), GETS_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(request[20:24]) == own_address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                    return
