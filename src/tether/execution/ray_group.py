"""Worker processes as Ray actors in a placement group, one for each device, on one node or on several."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tether.execution.cluster import LOOK_SECONDS, check_versions, connect, is_local, room
from tether.execution.transfers import FROM, TO, Transfers, size_of
from tether.execution.worker import Group, Process, Worker, this_process
from tether.runtime.disk import read_json
from tether.runtime.interrupt import give_up_if_interrupted
from tether.runtime.ranks import STATUS, Deadlines, Pool, RankFailed, RankLost
from tether.runtime.rendezvous import StoreAddress, serve_store
from tether.runtime.threads import OMP_NUM_THREADS, num_threads
from tether.training import MicroBatchTooLarge

__all__ = ["RayGroup", "is_local"]

CALL_SECONDS = 4 * 3600.0
"""Seconds that the driver waits for the answer of one call: a model that loads, an update."""
STACK_SECONDS = 1.0
"""Seconds that ranks have to write their stacks."""
SETTLE_SECONDS = 5.0
"""Seconds until the death of a rank is heard of after another rank failed because of it."""
LINES = 5


class RayGroup:
    """Ranks in processes of their own, which end when this process does; see `tether.execution.Group`.

    Args:
        pools: the devices; one rank for each, in their order.
        device: ``cpu`` or ``cuda``.
        threads: CPU threads of all ranks of a node together; None: one a core.
        logs: folder for what each rank prints.
        together: ranks that know each other; by default all do.
        options: of ``ray.init``, see `tether.execution.cluster.connect`.
        deadlines: how long ranks are waited for.

    Raises:
        RankFailed: Ray or a rank does not start; `RankLost`, a rank dies meanwhile.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        device: str,
        threads: int | None,
        logs: Path,
        *,
        together: Sequence[range] = (),
        options: Mapping[str, Any] | None = None,
        deadlines: Deadlines = Deadlines(),
    ) -> None:
        self.size = size = sum(pool.size for pool in pools)
        self._deadlines = deadlines
        self.transfers = Transfers()
        self._signs: list[dict[str, Any]] = [{}] * size
        """The last sign of life of each rank."""
        self._seen = self._signs
        """Those of the last look."""
        self._status = logs.absolute() / Path(STATUS).name
        self._silent = [0] * size
        """Looks since the last sign of life: not seconds, since the driver may have been stopped with the ranks."""
        self._processes: list[Process] = []
        self._logs = [logs.absolute() / f"rank_{rank}.log" for rank in range(size)]
        self._begins = [_begin(log, rank) for rank, log in enumerate(self._logs)]
        self._failure: RankFailed | None = None
        self._last_failure = _last_failure(self._status)
        self._turns = [threading.Lock() for _ in range(size)]
        """Of each rank: threads ask whether a checkpoint is written, and sample while others train."""
        self._looking, self._looked = threading.Lock(), 0.0
        self._rooms: list[Any] = []
        self._actors: list[Any] = []
        here = sum(pool.per_node for pool in pools)
        self._owns_ray = not ray.is_initialized()  # else a sweep or a notebook has more in it than this run
        host = connect(max(pool.nodes for pool in pools), here, device, options or {})
        try:
            self._store = _serve_store(host)
            self._address = StoreAddress(host, self._store.port)
            for rank in range(size):
                self._store.set(f"rank {rank}", "")
            for pool in pools:
                self._rooms.append(room(pool, device, deadlines.start))
            self._launch(pools, together or [range(size)], device, max(1, num_threads(threads) // here))
        except BaseException:
            self.close()
            raise

    def _launch(self, pools: Sequence[Pool], together: Sequence[range], device: str, threads: int) -> None:
        """Start the ranks, which then know each other."""
        actors = ray.remote(RayWorker)
        places = [
            PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=place // pool.per_node)
            for pool, reserved in zip(pools, self._rooms, strict=True)
            for place in range(pool.size)
        ]
        self._actors = [
            actors.options(
                num_cpus=1,
                num_gpus=int(device == "cuda"),
                scheduling_strategy=place,
                runtime_env={"env_vars": {OMP_NUM_THREADS: str(threads)}},  # Ray would set 1
            ).remote(rank, threads, self._logs[rank], Path.cwd(), self._address)
            for rank, place in enumerate(places)
        ]
        self._processes = self._answers("process", [()] * self.size, self._deadlines.start)
        check_versions(this_process(), self._processes)
        known = [next(ranks for ranks in together if rank in ranks) for rank in range(self.size)]
        joining = [(ranks, device, self._deadlines.collective) for ranks in known]
        self._answers("join", joining, self._deadlines.start)

    def some(self, ranks: range) -> Group:
        """Some of the ranks, which know each other."""
        return SomeRanks(self, ranks)

    def build(self, factory: Callable[..., Mapping[str, Any]], *arguments: object) -> None:
        """Have a factory, which is named by its module, make the parts on every rank."""
        self.ask("build", [(factory, arguments)] * self.size)

    def call(self, part: str, method: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        """See `tether.execution.Group`."""
        return self.ask("call", [None if given is None else (part, method, *given) for given in arguments])

    def share(self, value: object) -> object:
        """See `tether.execution.Group`."""
        return ray.put(value)

    def share_weights(self, part: str) -> Iterator[object]:
        """See `tether.execution.Group`."""
        return self.some(range(self.size)).share_weights(part)

    def read(self, shared: Any) -> Any:
        """See `tether.execution.Group`."""
        return ray.get(shared)

    def ask(self, name: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        """The answers of ranks to a method of `RayWorker`; None where the arguments are."""
        return self._answers(name, arguments, CALL_SECONDS)

    def close(self) -> None:
        """End all ranks, and Ray where it was started for them; once this is back, none of them is there."""
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor)
        self._signal(signal.SIGKILL)  # one that is stopped does not hear of Ray's end
        for reserved in self._rooms:
            remove_placement_group(reserved)
        self._actors, self._rooms, self._failure = [], [], None  # see `connect`
        if self._owns_ray:
            ray.shutdown()

    def _signal(self, number: int) -> None:
        """Send a signal to the ranks of this machine."""
        here = this_process().machine
        for process in self._processes:
            if process.machine == here:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _answers(self, name: str, arguments: Sequence[tuple[object, ...] | None], seconds: float) -> list[Any]:
        with ExitStack() as turns:
            for turn, given in zip(self._turns, arguments, strict=True):
                if given is not None:
                    turns.enter_context(turn)
            return self._answers_now(name, arguments, seconds)

    def _answers_now(self, name: str, arguments: Sequence[tuple[object, ...] | None], seconds: float) -> list[Any]:
        if self._failure:
            raise self._failure
        began = time.perf_counter()
        calls = {
            getattr(actor, name).remote(*given): rank
            for rank, (actor, given) in enumerate(zip(self._actors, arguments, strict=True))
            if given is not None
        }
        took = time.perf_counter() - began
        self.transfers.add(TO, size_of(arguments), took)
        with self._looking:
            self._note()
        answers: list[Any] = [None] * self.size
        waiting, until = list(calls), time.monotonic() + seconds
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=LOOK_SECONDS)
            if not ready:
                self._look()
            if not ready and time.monotonic() > until:
                late = ", ".join(self._name(calls[ref]) for ref in waiting)
                raise self._hangs(f"{late} gave no answer to {name} within {seconds:g} s", calls[waiting[0]])
            began = time.perf_counter()
            try:
                for ref in ready:
                    answers[calls[ref]] = ray.get(ref)
            except RayError:
                raise self._reason(calls) from None
            took = time.perf_counter() - began
            self.transfers.add(FROM, sum(size_of(answers[calls[ref]]) for ref in ready), took)
        return answers

    def _look(self) -> None:
        """Look for a sign of life of each rank, where no other thread just did.

        Raises:
            RankLost: one gave none for too long.
            Interrupted: the run is asked to stop, and one is silent.
        """
        with self._looking:
            if time.monotonic() > self._looked + LOOK_SECONDS / 2:
                self._look_now()
                self._looked = time.monotonic()

    def _look_now(self) -> None:
        self._note()
        for rank, (sign, last) in enumerate(zip(self._signs, self._seen, strict=True)):
            self._silent[rank] = self._silent[rank] + 1 if sign and sign is last else 0
        self._seen = self._signs
        silent = max(self._silent)
        rank = self._silent.index(silent)
        give_up_if_interrupted(time.monotonic() - silent * LOOK_SECONDS, f"{self._name(rank)} gave no sign of life")
        if silent * LOOK_SECONDS >= self._deadlines.silence:
            raise self._hangs(f"{self._name(rank)} is stopped: no sign of life for {silent * LOOK_SECONDS:g} s", rank)

    def _reason(self, calls: Mapping[Any, int]) -> RankFailed:
        """Which rank failed first; others that wait for it fail, too, and may be heard of before it."""
        settled, _ = ray.wait(list(calls), num_returns=len(calls), timeout=SETTLE_SECONDS)
        errors = {calls[ref]: error for ref in settled if (error := _error_of(ref))}
        for rank, error in errors.items():
            if isinstance(error, RayActorError):
                return self._failed(f"{self._name(rank)} died ({str(error).strip().splitlines()[-1].strip()})", rank)
        rank, error = next(iter(errors.items()))
        cause = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error
        kind = "" if isinstance(cause, ValueError) else f"{type(cause).__name__}: "
        what = f"{self._name(rank)}: {kind}{cause}"
        if isinstance(cause, MicroBatchTooLarge):
            lost = RankLost(what)
            lost.instead = cause.instead
            return self._ended(lost)
        if not _lost_the_others(cause):
            return self._failed(what + (_where(error) if kind else ""), None, RankFailed)
        failed = self._failed(what, None)
        self._write_stacks()  # the others may hang still
        return failed

    def _name(self, rank: int) -> str:
        several = len({process.host for process in self._processes}) > 1
        return f"rank {rank} on {self._processes[rank].host}" if several else f"rank {rank}"

    def _hangs(self, what: str, rank: int) -> RankFailed:
        failed = self._failed(what, rank)
        self._write_stacks()
        return failed

    def _write_stacks(self) -> None:
        """Have the ranks of this machine write what they are doing to their logs."""
        self._signal(signal.SIGUSR1)
        time.sleep(STACK_SECONDS)

    def _note(self) -> None:
        """Write what each rank does, for `tether status`."""
        self._signs = newest_signs(self._address, self._store, self._signs)
        if not all(self._signs) or not self._processes:
            return
        ranks = [
            sign | {"rank": rank, "process": f"{process.pid} on {process.host}", "silent": self._silent[rank]}
            for rank, (sign, process) in enumerate(zip(self._signs, self._processes, strict=True))
        ]
        with suppress(OSError):  # a full disk ends no run for this
            whole = self._status.with_suffix(".new")
            whole.write_text(json.dumps({"time": time.time(), **self._last_failure, "ranks": ranks}))
            whole.replace(self._status)

    def _failed(self, what: str, rank: int | None, kind: type[RankFailed] = RankLost) -> RankFailed:
        """After a failure the ranks no longer are at the same place, so that every later call fails, too."""
        log = self._logs[rank] if rank is not None else None
        said = log.read_bytes()[self._begins[rank] :] if rank is not None and log and log.exists() else b""
        lines = said.decode(errors="replace").splitlines()
        shown = "".join(f"\n  {line}" for line in lines[-LINES:])
        last = f". Its last lines, of {log}:{shown}" if lines else ""
        return self._ended(kind(what + last))

    def _ended(self, failure: RankFailed) -> RankFailed:
        self._failure = failure
        self._last_failure = {"failure": str(failure), "failed": time.time()}
        self._note()
        return failure


class RayWorker(Worker):
    """One rank, as an actor of Ray."""

    def store_weights(self, part: str, begin: bool) -> tuple[list[Any], bool]:
        """Store what `next_weights` gives; in a list, or the reference in it would be resolved."""
        weights, more = self.next_weights(part, begin)
        return [] if weights is None else [ray.put(weights)], more


@dataclass(frozen=True)
class SomeRanks:
    """Some of the ranks of a group, which know each other; see `tether.execution.Group`."""

    whole: RayGroup
    ranks: range

    @property
    def size(self) -> int:
        """How many."""
        return len(self.ranks)

    @property
    def transfers(self) -> Transfers:
        """See `tether.execution.Group`."""
        return self.whole.transfers

    def build(self, factory: Callable[..., Mapping[str, Any]], *arguments: object) -> None:
        """See `tether.execution.Group`."""
        self._ask("build", [(factory, arguments)] * self.size)

    def call(self, part: str, method: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        """See `tether.execution.Group`."""
        return self._ask("call", [None if given is None else (part, method, *given) for given in arguments])

    def share(self, value: object) -> object:
        """See `tether.execution.Group`."""
        return self.whole.share(value)

    def share_weights(self, part: str) -> Iterator[object]:
        """See `tether.execution.Group`."""

        def store(*, begin: bool) -> tuple[list[object], bool]:
            answer: tuple[list[object], bool] = self._ask("store_weights", [(part, begin)] * self.size)[0]
            return answer

        with ThreadPoolExecutor(1, thread_name_prefix="weights") as thread:
            asked, more = thread.submit(store, begin=True), True
            while more:
                (stored,), more = asked.result()
                if more:
                    asked = thread.submit(store, begin=False)
                yield stored

    def read(self, shared: object) -> Any:
        """See `tether.execution.Group`."""
        return self.whole.read(shared)

    def _ask(self, name: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        of_all: list[tuple[object, ...] | None] = [None] * self.whole.size
        of_all[self.ranks.start : self.ranks.stop] = arguments
        return self.whole.ask(name, of_all)[self.ranks.start : self.ranks.stop]


def _begin(log: Path, rank: int) -> int:
    """Add a line to a rank's log, which keeps what earlier ones wrote; returns where the lines of the rank begin."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError), log.open("a") as file:  # a full disk ends no run for this
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank} begins", file=file)
    return log.stat().st_size if log.exists() else 0


def newest_signs(address: StoreAddress, store: dist.Store, last: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last sign of life of each rank; the same object where there is none that is newer.

    Whatever else is in the store is passed over: anybody who reaches its port can write there.
    """
    keys = [f"rank {rank}" for rank in range(len(last))]
    signs = []
    for key, written, before in zip(keys, store.multi_get(keys), last, strict=True):
        value = address.verified(key, written)
        sign = before if value is None else json.loads(value)
        signs.append(sign if sign.get("beat", 0) > before.get("beat", 0) else before)
    return signs


def _serve_store(host: str) -> dist.TCPStore:
    try:
        return serve_store(host)
    except OSError as error:
        raise RankFailed(
            f"this machine cannot listen at {host}, its address in the Ray cluster ({error.strerror}). Start Ray with "
            "--node-ip-address=ADDRESS, an address of this machine that the others can reach"
        ) from None


def _last_failure(status: Path) -> dict[str, Any]:
    """The error that ended the previous ranks, and when."""
    with suppress(ValueError, KeyError, TypeError):
        found = read_json(status, dict, "")
        return {"failure": str(found["failure"]), "failed": float(found["failed"])}
    return {"failure": None, "failed": None}


def _error_of(ref: Any) -> RayError | None:
    try:
        ray.get(ref)
    except RayError as error:
        return error
    return None


def _where(error: RayError) -> str:
    """The rank's traceback, for an error that its text alone does not explain."""
    lines = [line for line in str(error).splitlines() if line.startswith("  ")]
    return "".join(f"\n{line}" for line in lines)


def _lost_the_others(error: Exception) -> bool:
    """Whether a connection or a device failed, not what was computed: Gloo raises plain RuntimeErrors."""
    of_torch = isinstance(error, torch.distributed.DistError | torch.AcceleratorError)
    return of_torch or (isinstance(error, RuntimeError) and "gloo" in str(error))
