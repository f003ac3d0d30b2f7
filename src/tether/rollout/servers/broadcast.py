"""Weights on their way to servers on other machines: broadcasts of a process group of the trainer and their workers."""

from __future__ import annotations

import re
import socket
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import TypeVar

from torch import Tensor
from torch._C._distributed_c10d import Backend

from tether.rollout.inside.tether_buffers import broadcast, joined
from tether.rollout.servers.http import ConnectionLost, Connections, ServerFailed, ServerGone, ServerRefuses
from tether.runtime.rendezvous import serve_store

Result = TypeVar("Result")
_BROKEN = re.compile("connection (closed|reset)|gloo/transport|ncclRemoteError", re.IGNORECASE)
"""Of what a server says whose workers lost this process; this end may have sent all that it had by then."""
_BESIDE = 5.0  # seconds in which this end, too, notices a broken connection, also on a busy machine


class BroadcastGroup:
    """Of this process, rank 0, and a server's workers: by Gloo, from the host's memory, or by NCCL, from a GPU's.

    It is for one update: a run that is killed within it leaves none to the next, nor does a server.

    Args:
        http: the server.
        workers: that it has.
        name: of the weights.
        within: seconds in which all must have joined, and each broadcast must be done.
        backend: ``gloo`` or ``nccl``.

    Raises:
        ServerGone: it does not answer.
        ValueError: this machine cannot be connected to at the address from which it reaches the server.
    """

    def __init__(self, http: Connections, workers: int, name: str, within: float, backend: str) -> None:
        self.name = f"tether-{name}-{uuid.uuid4().hex[:8]}"  # which no other group of this server has, or had
        self.ranks, self.backend, self._http, self._within = 1 + workers, backend, http, within
        self.address, _ = _addresses(http)
        self._timeout = timedelta(seconds=within)
        try:
            self._store = serve_store(self.address, self._timeout)
        except OSError as error:
            key = "actor_rollout_ref.rollout.weight_transfer"
            raise ValueError(
                f"{key}: for broadcasts, this machine cannot listen at its address {self.address}: {error}"
            ) from None
        self.port = self._store.port
        self._group: Backend | None = None

    def join(self, route: str, body: object) -> None:
        """Join it, while a request has the server's workers do so.

        Raises:
            ServerGone: they do not; `ConnectionLost`: nothing but a connection of the group broke.
            ServerRefuses: they will not.
        """
        self._group = self._both(route, body, self._joined)

    def send(self, route: str, body: object, tensors: list[Tensor]) -> None:
        """Broadcast tensors, while a request has the workers receive them; see `join`."""
        group = self._group
        assert group is not None
        self._both(route, body, lambda: broadcast(group, tensors))

    def _both(self, route: str, body: object, ours: Callable[[], Result]) -> Result:
        """The server's side and ours at once. Where it refuses, ours is left waiting: nobody will come."""
        meanwhile = _in_thread(ours)
        try:
            self._http.post(route, body, self._within)
        except (ServerFailed, ServerRefuses) as error:
            if _BROKEN.search(str(error)) or _failed(meanwhile):
                what = f"the connection between this process ({self.address}) and the server's workers broke"
                raise ConnectionLost(f"{what}: {error}") from None
            raise
        try:
            return meanwhile.result(self._within)
        except (RuntimeError, TimeoutError) as error:
            raise ServerGone(f"{self._http.url}{route}: {error}") from None

    def _joined(self) -> Backend:
        return joined(self._store, 0, self.ranks, self.name, self.backend, self.address, self._timeout)


def _failed(sent: Future[Result]) -> bool:
    """Whether this end fails, too, soon after the server's."""
    try:
        return sent.exception(_BESIDE) is not None
    except TimeoutError:
        return False


def is_here(http: Connections) -> bool:
    """Whether a server is on this machine: both ends of a connection to it then have the same address.

    Raises:
        ServerGone: it does not answer.
    """
    ours, theirs = _addresses(http)
    return ours == theirs


def _addresses(http: Connections) -> tuple[str, str]:
    """This machine's, as the server's can reach it, and the server's."""
    try:
        with socket.create_connection((http.host, http.port), timeout=10) as found:
            return found.getsockname()[0], found.getpeername()[0]
    except OSError as error:
        raise ServerGone(f"{http.url}: {error}") from None


def _in_thread(do: Callable[[], Result]) -> Future[Result]:
    """Run beside this thread; nobody has to wait for the end of it."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(do())
        except RuntimeError as error:
            # The frames of its traceback would keep the group until they are collected.
            future.set_exception(error.with_traceback(None))

    Thread(target=run, daemon=True).start()
    return future
