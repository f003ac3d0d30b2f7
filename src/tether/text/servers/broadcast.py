"""Broadcasts weights to servers on other machines, in a process group of the trainer and the server's workers."""

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

from tether.runtime.rendezvous import serve_store
from tether.text.servers.http import ConnectionLost, Connections, ServerFailed, ServerGone, ServerRefuses
from tether.text.servers.inside.tether_buffers import broadcast, joined

Result = TypeVar("Result")
_BROKEN = re.compile("connection (closed|reset)|gloo/transport|ncclRemoteError", re.IGNORECASE)
"""Errors of a server whose workers lost the connection; this process may already have sent all its data by then."""
_NOTICE_SECONDS = 5.0  # seconds until this process also notices a broken connection, even on a busy machine


class BroadcastGroup:
    """A process group with this process as rank 0 and the workers of a server, over Gloo for host memory or NCCL for
    GPU memory.

    It is used for one update, so that nothing remains of a killed run or server.

    Raises:
        ServerGone: the server does not respond.
        ValueError: the server cannot connect to this machine at the address from which this machine connects to the
            server.
    """

    def __init__(self, http: Connections, workers: int, name: str, timeout: float, backend: str) -> None:
        self.name = f"tether-{name}-{uuid.uuid4().hex[:8]}"  # unique among all groups of this server
        self.ranks, self.backend, self._http, self._timeout = 1 + workers, backend, http, timeout
        self.address, _ = _addresses(http)
        try:
            self._store = serve_store(self.address, timedelta(seconds=timeout))
        except OSError as error:
            key = "actor_rollout_ref.rollout.weight_transfer"
            raise ValueError(
                f"{key}: for broadcasts, this machine cannot listen at its address {self.address}: {error}"
            ) from None
        self.port = self._store.port
        self._group: Backend | None = None

    def join(self, route: str, body: object) -> None:
        """Join the group while a request makes the server's workers join it.

        Raises:
            ServerGone: they do not join; `ConnectionLost`: only a connection of the group broke.
            ServerRefuses: the request is refused.
        """
        self._group = self._run_both(route, body, self._joined)

    def send(self, route: str, body: object, tensors: list[Tensor]) -> None:
        """Broadcast tensors while a request makes the workers receive them; errors are those of `join`."""
        group = self._group
        assert group is not None
        self._run_both(route, body, lambda: broadcast(group, tensors))

    def _run_both(self, route: str, body: object, ours: Callable[[], Result]) -> Result:
        """Run the request and the local side in parallel.

        If the server refuses, the thread of the local side is abandoned, since it waits for peers that never come.
        """
        sending = _in_thread(ours)
        try:
            self._http.post(route, body, self._timeout)
        except (ServerFailed, ServerRefuses) as error:
            if _BROKEN.search(str(error)) or _failed(sending):
                what = f"the connection between this process ({self.address}) and the server's workers broke"
                raise ConnectionLost(f"{what}: {error}") from None
            raise
        try:
            return sending.result(self._timeout)
        except (RuntimeError, TimeoutError) as error:
            raise ServerGone(f"{self._http.url}{route}: {error}") from None

    def _joined(self) -> Backend:
        timeout = timedelta(seconds=self._timeout)
        return joined(self._store, 0, self.ranks, self.name, self.backend, self.address, timeout)


def _failed(sent: Future[Result]) -> bool:
    """Return whether the local side also fails soon after the server's."""
    try:
        return sent.exception(_NOTICE_SECONDS) is not None
    except TimeoutError:
        return False


def is_local(http: Connections) -> bool:
    """Return whether a server is on this machine: both ends of a connection to it then have the same address.

    Raises:
        ServerGone: the server does not respond.
    """
    ours, theirs = _addresses(http)
    return ours == theirs


def _addresses(http: Connections) -> tuple[str, str]:
    """Return the address of this machine at which the server can reach it, and that of the server."""
    try:
        with socket.create_connection((http.host, http.port), timeout=10) as connection:
            return connection.getsockname()[0], connection.getpeername()[0]
    except OSError as error:
        raise ServerGone(f"{http.url}: {error}") from None


def _in_thread(do: Callable[[], Result]) -> Future[Result]:
    """Run a function in a daemon thread, which does not delay the exit of the process."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(do())
        except RuntimeError as error:
            # The frames of its traceback would keep the group alive until they are garbage-collected.
            future.set_exception(error.with_traceback(None))

    Thread(target=run, daemon=True).start()
    return future
