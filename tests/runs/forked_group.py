"""Ranks of a run without Ray: forked from a process that has imported everything once, and so started in no time."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.forks import forking
from tether.distributed.transfers import Transfers
from tether.distributed.worker import Worker
from tether.runtime.ranks import Pool, RankFailed
from tether.runtime.rendezvous import StoreAddress, serve_store

JOIN_SECONDS = 600.0


class ForkedGroup:
    """See `tether.distributed.Group`; takes the place of `tether.distributed.ray_group.RayGroup`."""

    def __init__(self, pools: Sequence[Pool], device: str, threads: int | None, logs: Path, **_: object) -> None:
        self.size, self.transfers = sum(pool.size for pool in pools), Transfers()
        context = forking()
        self._store = serve_store("127.0.0.1")
        address = StoreAddress("127.0.0.1", self._store.port)
        self._logs = [logs / f"rank_{rank}.log" for rank in range(self.size)]
        self._ranks, self._processes = [], []
        for rank in range(self.size):
            here, there = context.Pipe()
            of_worker = (rank, threads or 1, self._logs[rank], Path.cwd(), address)
            process = context.Process(target=_serve, args=(there, of_worker), daemon=True)
            process.start()
            there.close()
            self._ranks.append(here)
            self._processes.append(process)
        self._answers("join", [(range(self.size), device, JOIN_SECONDS)] * self.size)

    def some(self, ranks: range) -> ForkedGroup:
        """All of them: no model has devices of its own here."""
        assert len(ranks) == self.size
        return self

    def build(self, factory: Callable[..., Mapping[str, Any]], *arguments: object) -> None:
        """See there."""
        self._answers("build", [(factory, arguments)] * self.size)

    def call(self, component: str, method: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        """See there."""
        return self._answers("call", [None if args is None else (component, method, *args) for args in arguments])

    def share(self, value: object) -> object:
        """See there."""
        return value

    def share_weights(self, component: str) -> Iterator[object]:
        """See there."""
        begin, more = True, True
        while more:
            weights, more = self._answers("next_weights", [(component, begin)] * self.size)[0]
            begin = False
            yield weights

    def read(self, shared: object) -> object:
        """See there."""
        return shared

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
            process.join()

    def _answers(self, method: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        asked = {self._ranks[rank]: rank for rank, given in enumerate(arguments) if given is not None}
        for connection, rank in asked.items():
            try:
                connection.send_bytes(pickle.dumps((method, arguments[rank])))
            except BrokenPipeError:
                raise self._ended(rank) from None
        answers: list[Any] = [None] * self.size
        while asked:
            for connection in wait(list(asked)):
                assert isinstance(connection, Connection)
                rank = asked.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    raise self._ended(rank) from None
        return answers

    def _ended(self, rank: int) -> RankFailed:
        return RankFailed(f"rank {rank} ended:\n{self._logs[rank].read_text()}")


def _serve(connection: Connection, of_worker: tuple[Any, ...]) -> None:
    """The life of a rank."""
    worker = Worker(*of_worker)
    while True:
        method, arguments = pickle.loads(connection.recv_bytes())
        connection.send_bytes(pickle.dumps(getattr(worker, method)(*arguments)))
