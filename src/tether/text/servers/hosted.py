"""A server on the node of a rank: a companion process of the rank starts and supervises it, and passes weights to it.

The server listens on its own node only. Requests go through Ray to the companion, and so do weights: each chunk is sent
to a node once; all companions there read it in shared memory and pass it on to their servers::

    rank 0 ──► chunk in Ray's object store ──► node A: companion ──► server
                                           ──► node B: companion ──► server
                                                       companion ──► server
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Full, Queue
from typing import Any, Self

from torch import Tensor

from tether.distributed import Companion, CompanionLost, NodeLost, StoredWeights
from tether.distributed.handles import WeightsOnRanks
from tether.runtime.ranks import RankLost
from tether.text.servers.api import GenerateRequest, Launch, SampledRow, ServerApi
from tether.text.servers.http import Connections, MachineLost, ServerGone
from tether.text.servers.protocol import NamedUpdate, SamplingServer
from tether.text.servers.server import InferenceServer

START_SECONDS = 300.0
"""Seconds for the start of a companion's process, in addition to those of its server."""
QUICK_SECONDS = 30.0
"""Seconds for a call that only reads state or stops the server."""
POLL_SECONDS = 0.1
"""Interval of checks for a failed update, while a chunk waits for the previous one."""


@dataclass(eq=False)
class HostedServer(SamplingServer):
    """A server that runs in a companion process, as a `ServerHost`."""

    api: ServerApi
    companion: Companion
    name: str
    """Name of its log."""
    timeout: float
    """Seconds for its start, and for loading weights."""
    bytes_sent: int = 0

    def __post_init__(self) -> None:
        self.token_timeout = self.timeout

    @property
    def url(self) -> str:
        return f"{self.name} on {self.companion.host}"

    def start(self) -> None:
        self.companion.start()

    def wait_ready(self) -> None:
        self.start()
        self._call("wait_ready", timeout=self.timeout + START_SECONDS)

    def is_healthy(self) -> bool:
        with suppress(ServerGone):
            return bool(self._call("is_healthy"))
        return False

    def generate(self, request: GenerateRequest, vocabulary: int) -> SampledRow:
        try:
            sampled: SampledRow = self.companion.work("generate", request, vocabulary)
        except CompanionLost as error:
            raise (MachineLost if isinstance(error, NodeLost) else ServerGone)(str(error)) from None
        return sampled

    def abort(self) -> None:
        self._call("abort")

    def cut(self) -> None:
        self.companion.cut()

    def run(self, action: Callable[[Connections, float], None]) -> None:
        self._call("run", action)

    def has_weights(self, weights: str) -> bool:
        with suppress(ServerGone):
            return bool(self._call("has_weights", weights))
        return False

    @classmethod
    def load(cls, servers: Sequence[Self], update: NamedUpdate) -> dict[Self, ServerGone]:
        # All servers get a chunk at the same time, so that the weights are gathered from the ranks only once.
        weights, failures = update.tensors, dict[Self, ServerGone]()
        assert isinstance(weights, WeightsOnRanks)

        def on_all(method: str, *arguments: object) -> None:
            replies = {
                server: threads.submit(server._call, method, *arguments) for server in servers if server not in failures
            }
            for server, reply in replies.items():
                try:
                    server.bytes_sent += reply.result() or 0
                except ServerGone as error:
                    failures[server] = error

        with ThreadPoolExecutor(len(servers), thread_name_prefix="weights") as threads:
            on_all("begin_update", replace(update, tensors=()))
            for chunk in weights.shared():
                on_all("add_chunk", chunk)
            on_all("finish_update")
        return failures

    def progress_counter(self, timeout: float) -> float | None:
        with suppress(ServerGone):
            counter: float | None = self._call("progress_counter", timeout, timeout=timeout)
            return counter
        return None

    def sleep(self) -> None:
        self._call("sleep")

    def wake(self) -> None:
        self._call("wake")

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        try:
            with suppress(ServerGone, RankLost):
                self._call("stop", timeout=QUICK_SECONDS)
        finally:
            self.companion.close()

    def explained(self, error: Exception) -> str:
        with suppress(ServerGone, RankLost):
            return str(self._call("explained", error, timeout=QUICK_SECONDS))
        return str(error)

    def next_step(self) -> str:
        return "The server is restarted"

    def fault(self) -> str:
        with suppress(ServerGone, RankLost):
            return str(self._call("fault", timeout=QUICK_SECONDS))
        return ""

    def _call(self, method: str, *arguments: object, timeout: float | None = None) -> Any:
        """Call a method of the `ServerHost`, which has its own timeouts, and return the result.

        Raises:
            ServerGone: the companion is gone; `MachineLost`: its node is gone, too.
        """
        try:
            return self.companion.call(method, *arguments, timeout=timeout or self.timeout + QUICK_SECONDS)
        except CompanionLost as error:
            raise (MachineLost if isinstance(error, NodeLost) else ServerGone)(str(error)) from None


@dataclass(eq=False)
class ServerHost(InferenceServer):
    """The server in the companion process. An update is one call for each chunk of weights."""

    _chunks: Queue[StoredWeights | None] = field(default_factory=lambda: Queue(1), init=False)
    _update: Future[None] | None = field(default=None, init=False)

    def start(self) -> None:
        assert isinstance(self.launch_or_url, Launch)
        self.launch_or_url.check_node(self.node, self.api.title)
        try:
            super().start()
        except OSError as error:  # for example, no port is free
            raise ValueError(f"{self.node}: the {self.api.title} server cannot be started there: {error}") from None

    def begin_update(self, update: NamedUpdate) -> None:
        """Begin to load weights, whose chunks follow."""
        self._chunks = Queue(1)
        thread = ThreadPoolExecutor(1, thread_name_prefix="update")
        self._update = thread.submit(self.load_update, replace(update, tensors=self._arriving()))
        thread.shutdown(wait=False)

    def add_chunk(self, chunk: StoredWeights | None) -> None:
        """Load a chunk; None ends the update. Does nothing if the update has failed."""
        assert self._update is not None
        while not self._update.done():
            with suppress(Full):
                self._chunks.put(chunk, timeout=POLL_SECONDS)
                return

    def finish_update(self) -> int:
        """Wait for the end of the update, and return the bytes that the server received.

        Raises:
            ServerGone: it died during the update.
            ValueError: it refuses the weights.
        """
        assert self._update is not None
        self.add_chunk(None)
        self._update.result()
        sent, self.bytes_sent = self.bytes_sent, 0
        return sent

    def _arriving(self) -> Iterator[tuple[str, Tensor]]:
        while (chunk := self._chunks.get()) is not None:
            yield from chunk.update(0).tensors


def host_server(api: ServerApi, launch: Launch, timeout: float, node: str) -> ServerHost:
    """Return a server that starts on this node; an error in its start is raised by the first call of `wait_ready`."""
    server = ServerHost(api, launch, timeout, math.inf, node=node)
    with suppress(ValueError):
        server.start()
    return server
