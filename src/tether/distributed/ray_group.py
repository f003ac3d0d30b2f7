"""Worker processes as Ray actors in a placement group, one for each device, on one node or on several."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tether.distributed.cluster import POLL_SECONDS, check_versions, connect, is_local, reserve
from tether.distributed.companions import LOST_DATA, RayCompanion
from tether.distributed.transfers import FROM, TO, Transfers, size_of
from tether.distributed.worker import Group, Process, Worker, this_process
from tether.loop.engine import LOWER, MicroBatchTooLarge
from tether.runtime.disk import read_json
from tether.runtime.interrupt import raise_if_interrupted
from tether.runtime.ranks import STATUS, Deadlines, Pool, RankFailed, RankLost
from tether.runtime.rendezvous import StoreAddress, serve_store
from tether.runtime.threads import OMP_NUM_THREADS, num_threads

__all__ = ["RayGroup", "is_local"]

CALL_SECONDS = 4 * 3600.0
"""Timeout of one call, such as loading a model or an update."""
STACK_SECONDS = 1.0
"""Seconds that ranks get to write their stacks."""
SETTLE_SECONDS = 5.0
"""Seconds until Ray reports the death of a rank after another rank failed because of it."""
LOG_LINES = 5
"""Lines of a rank's log in an error."""
DEATHS = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, LocalRayletDiedError)
"""Errors of Ray about a process or machine that is gone."""
BACKTRACE = re.compile(r"\*\*\* (SIG|StackTrace)|@ +(0x|\.\.\. and)|\) \[0x[0-9a-f]+\]")
"""Line of a C++ backtrace, which Ray writes to the log of a rank that dies."""


class RayGroup:
    """A `tether.distributed.Group` of processes, which end when this process does.

    Args:
        pools: the devices, with one rank each in this order.
        device: ``cpu`` or ``cuda``.
        threads: CPU threads of all ranks of a node together; None for one per core.
        logs: folder for the output of ranks.
        together: ranks with a process group; by default one of all ranks.
        options: arguments of ``ray.init``, as in `tether.distributed.cluster.connect`.
        deadlines: timeouts of ranks.

    Raises:
        RankFailed: Ray or a rank does not start, or (`RankLost`) a rank dies meanwhile.
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
        self._heartbeats: list[dict[str, Any]] = [{}] * size
        """Last heartbeat of each rank."""
        self._polled_heartbeats = self._heartbeats
        """Heartbeats at the last poll."""
        self._status = logs.absolute() / Path(STATUS).name
        self._missed_polls = [0] * size
        """Polls since the last heartbeat; not seconds, since the driver may be stopped together with ranks."""
        self._processes: list[Process] = []
        self._logs = [logs.absolute() / f"rank_{rank}.log" for rank in range(size)]
        self._log_starts = [_start_log(log, rank) for rank, log in enumerate(self._logs)]
        self._failure: RankFailed | None = None
        self._last_failure = _last_failure(self._status)
        self._call_locks = [threading.Lock() for _ in range(size)]
        """A lock for each rank, since threads poll checkpoints and sample while other ranks train."""
        self._poll_lock, self._polled_at = threading.Lock(), 0.0
        self._spare_ranks = range(0)
        """Ranks without components, whose loss changes nothing for the others."""
        self._reservations: list[Any] = []
        self._actors: list[Any] = []
        self._companions: list[RayCompanion] = []
        devices_per_node = sum(pool.per_node for pool in pools)
        self._owns_ray = not ray.is_initialized()  # otherwise a sweep or a notebook also uses it
        host = connect(max(pool.nodes for pool in pools), devices_per_node, device, options or {})
        try:
            self._store = _serve_store(host)
            self._address = StoreAddress(host, self._store.port)
            for rank in range(size):
                self._store.set(f"rank {rank}", "")
            for pool in pools:
                self._reservations.append(reserve(pool, device, deadlines.start))
            self._launch(pools, together or [range(size)], device, max(1, num_threads(threads) // devices_per_node))
        except BaseException:
            self.close()
            raise

    def _launch(self, pools: Sequence[Pool], together: Sequence[range], device: str, threads: int) -> None:
        """Start the ranks and their process groups."""
        actors = ray.remote(RayWorker)
        strategies = [
            PlacementGroupSchedulingStrategy(reservation, placement_group_bundle_index=index // pool.per_node)
            for pool, reservation in zip(pools, self._reservations, strict=True)
            for index in range(pool.size)
        ]
        self._actors = [
            actors.options(
                num_cpus=1,
                num_gpus=int(device == "cuda"),
                scheduling_strategy=strategy,
                runtime_env={"env_vars": {OMP_NUM_THREADS: str(threads)}},  # Ray would set 1
            ).remote(rank, threads, self._logs[rank], Path.cwd(), self._address)
            for rank, strategy in enumerate(strategies)
        ]
        self._processes = self._call_ranks("process", [()] * self.size, self._deadlines.start)
        check_versions(this_process(), self._processes)
        groups = [next(ranks for ranks in together if rank in ranks) for rank in range(self.size)]
        joining = [(ranks, device, self._deadlines.collective) for ranks in groups]
        self._call_ranks("join", joining, self._deadlines.start)

    def some(self, ranks: range) -> Group:
        """Return the group of some of the ranks, which must have a process group."""
        return RankSubset(self, ranks)

    @property
    def processes(self) -> Sequence[Process]:
        return self._processes

    def do_without(self, ranks: range) -> None:
        self._spare_ranks = ranks

    def companion(self, rank: int, threads: int, factory: Callable[..., Any], *arguments: object) -> RayCompanion:
        make, needs_node = partial(factory, *arguments), rank not in self._spare_ranks
        companion = RayCompanion(self._processes[rank], threads, make, needs_node=needs_node)
        self._companions.append(companion)
        return companion

    def build(self, factory: Callable[..., Mapping[str, Any]], *arguments: object) -> None:
        self.call_method("build", [(factory, arguments)] * self.size)

    def call(self, component: str, method: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        return self.call_method("call", [None if args is None else (component, method, *args) for args in arguments])

    def share(self, value: object) -> object:
        return ray.put(value)

    def share_weights(self, component: str) -> Iterator[object]:
        return self.some(range(self.size)).share_weights(component)

    def read(self, shared: Any) -> Any:
        try:
            return ray.get(shared)
        except ObjectLostError:
            raise self._failed(LOST_DATA, None) from None

    def call_method(self, name: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        """Call a method of `RayWorker` on the ranks whose arguments are not None, and return the results."""
        return self._call_ranks(name, arguments, CALL_SECONDS)

    def close(self) -> None:
        """End all ranks, and Ray if it was started for them; returns when their processes are gone."""
        for companion in self._companions:
            companion.close()
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor)
        self._signal(signal.SIGKILL)  # a stopped process does not react to Ray's shutdown
        for reservation in self._reservations:
            remove_placement_group(reservation)
        self._actors, self._companions, self._reservations = [], [], []
        self._failure = None  # frees objects of this session, see `connect`
        if self._owns_ray:
            ray.shutdown()

    def _signal(self, number: int) -> None:
        """Send a signal to the ranks of this machine."""
        machine = this_process().machine
        for process in self._processes:
            if process.machine == machine:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _call_ranks(self, name: str, arguments: Sequence[tuple[object, ...] | None], timeout: float) -> list[Any]:
        with ExitStack() as locks:
            for lock, args in zip(self._call_locks, arguments, strict=True):
                if args is not None:
                    locks.enter_context(lock)
            return self._call_locked(name, arguments, timeout)

    def _call_locked(self, name: str, arguments: Sequence[tuple[object, ...] | None], timeout: float) -> list[Any]:
        if self._failure:
            raise self._failure
        began = time.perf_counter()
        calls = {
            getattr(actor, name).remote(*args): rank
            for rank, (actor, args) in enumerate(zip(self._actors, arguments, strict=True))
            if args is not None
        }
        elapsed = time.perf_counter() - began
        self.transfers.add(TO, size_of(arguments), elapsed)
        with self._poll_lock:
            self._write_status()
        results: list[Any] = [None] * self.size
        waiting, deadline = list(calls), time.monotonic() + timeout
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=POLL_SECONDS)
            if not ready:
                self._poll()
            if not ready and time.monotonic() > deadline:
                late = ", ".join(self._name(calls[ref]) for ref in waiting)
                raise self._hung(f"{late} did not return from {name} within {timeout:g} s", calls[waiting[0]])
            began = time.perf_counter()
            try:
                for ref in ready:
                    results[calls[ref]] = ray.get(ref)
            except RayError:
                raise self._failure_of(calls) from None
            elapsed = time.perf_counter() - began
            self.transfers.add(FROM, sum(size_of(results[calls[ref]]) for ref in ready), elapsed)
        return results

    def _poll(self) -> None:
        """Poll the heartbeats of all ranks, unless another thread just did.

        Raises:
            RankLost: a rank sent none for too long.
            Interrupted: the run is to stop, and a rank is silent.
        """
        with self._poll_lock:
            if time.monotonic() > self._polled_at + POLL_SECONDS / 2:
                self._poll_now()
                self._polled_at = time.monotonic()

    def _poll_now(self) -> None:
        self._write_status()
        for rank, (heartbeat, last) in enumerate(zip(self._heartbeats, self._polled_heartbeats, strict=True)):
            is_silent = heartbeat and heartbeat is last and rank not in self._spare_ranks
            self._missed_polls[rank] = self._missed_polls[rank] + 1 if is_silent else 0
        self._polled_heartbeats = self._heartbeats
        silent = max(self._missed_polls)
        rank = self._missed_polls.index(silent)
        raise_if_interrupted(time.monotonic() - silent * POLL_SECONDS, f"{self._name(rank)} gave no sign of life")
        if silent * POLL_SECONDS >= self._deadlines.silence:
            raise self._hung(f"{self._name(rank)} is stopped: no sign of life for {silent * POLL_SECONDS:g} s", rank)

    def _failure_of(self, calls: Mapping[Any, int]) -> RankFailed:
        """Return the error of the rank that failed first; ranks that wait for it fail too, perhaps reported earlier."""
        settled, _ = ray.wait(list(calls), num_returns=len(calls), timeout=SETTLE_SECONDS)
        errors = {calls[ref]: error for ref in settled if (error := _error_of(ref))}
        for rank, error in errors.items():
            if isinstance(error, DEATHS):
                reason = str(error).strip().splitlines()[-1].strip()
                if isinstance(error, OutOfMemoryError):  # Ray reports the state of the machine in 45 lines
                    reason = f"Ray's memory monitor killed it, because its machine ran out of memory. {LOWER}"
                return self._failed(f"{self._name(rank)} died ({reason})", rank)
        rank, error = next(iter(errors.items()))
        cause = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error
        if isinstance(cause, ObjectLostError):
            return self._failed(f"{self._name(rank)}: {LOST_DATA}", None)
        kind = "" if isinstance(cause, ValueError) else f"{type(cause).__name__}: "
        what = f"{self._name(rank)}: {kind}{cause}"
        if isinstance(cause, MicroBatchTooLarge):
            lost = RankLost(what)
            lost.instead = cause.instead
            return self._ended(lost)
        if not _lost_connection(cause):
            return self._failed(what + (_traceback_of(error) if kind else ""), None, RankFailed)
        failed = self._failed(what, None)
        self._write_stacks()  # the other ranks may still hang
        return failed

    def _name(self, rank: int) -> str:
        several = len({process.host for process in self._processes}) > 1
        return f"rank {rank} on {self._processes[rank].host}" if several else f"rank {rank}"

    def _hung(self, what: str, rank: int) -> RankFailed:
        failed = self._failed(what, rank)
        self._write_stacks()
        return failed

    def _write_stacks(self) -> None:
        """Make the ranks of this machine write their stacks to their logs."""
        self._signal(signal.SIGUSR1)
        time.sleep(STACK_SECONDS)

    def _write_status(self) -> None:
        """Write what each rank is doing, for `tether status`."""
        self._heartbeats = newest_heartbeats(self._address, self._store, self._heartbeats)
        if not all(self._heartbeats) or not self._processes:
            return
        ranks = [
            heartbeat
            | {"rank": rank, "process": f"{process.pid} on {process.host}", "silent": self._missed_polls[rank]}
            for rank, (heartbeat, process) in enumerate(zip(self._heartbeats, self._processes, strict=True))
        ]
        with suppress(OSError):  # a full disk must not end the run here
            new_file = self._status.with_suffix(".new")
            new_file.write_text(json.dumps({"time": time.time(), **self._last_failure, "ranks": ranks}))
            new_file.replace(self._status)

    def _failed(self, what: str, rank: int | None, kind: type[RankFailed] = RankLost) -> RankFailed:
        """Return the error with the end of the rank's log; ranks are out of step, and later calls fail too."""
        log = self._logs[rank] if rank is not None else None
        output = log.read_bytes()[self._log_starts[rank] :] if rank is not None and log and log.exists() else b""
        lines = [line for line in output.decode(errors="replace").splitlines() if line and not BACKTRACE.search(line)]
        shown = "".join(f"\n  {line}" for line in lines[-LOG_LINES:])
        last = f". Its last lines, of {log}:{shown}" if lines else ""
        return self._ended(kind(what + last))

    def _ended(self, failure: RankFailed) -> RankFailed:
        self._failure = failure
        self._last_failure = {"failure": str(failure), "failed": time.time()}
        self._write_status()
        return failure


class RayWorker(Worker):
    """A rank as an actor of Ray."""

    def process(self) -> Process:
        return replace(super().process(), node=ray.get_runtime_context().get_node_id())

    def store_weights(self, component: str, begin: bool) -> tuple[list[Any], bool]:
        """Store the result of `next_weights`; the reference is in a list, since Ray would resolve it otherwise."""
        weights, more = self.next_weights(component, begin)
        return [] if weights is None else [ray.put(weights)], more


@dataclass(frozen=True)
class RankSubset:
    """The `tether.distributed.Group` of some of the ranks of a group."""

    group: RayGroup
    ranks: range

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def transfers(self) -> Transfers:
        return self.group.transfers

    def build(self, factory: Callable[..., Mapping[str, Any]], *arguments: object) -> None:
        self._call_method("build", [(factory, arguments)] * self.size)

    def call(self, component: str, method: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        return self._call_method("call", [None if args is None else (component, method, *args) for args in arguments])

    def share(self, value: object) -> object:
        return self.group.share(value)

    def share_weights(self, component: str) -> Iterator[object]:

        def store(*, begin: bool) -> tuple[list[object], bool]:
            result: tuple[list[object], bool] = self._call_method("store_weights", [(component, begin)] * self.size)[0]
            return result

        with ThreadPoolExecutor(1, thread_name_prefix="weights") as thread:
            future, more = thread.submit(store, begin=True), True
            while more:
                (stored,), more = future.result()
                if more:
                    future = thread.submit(store, begin=False)
                yield stored

    def read(self, shared: object) -> Any:
        return self.group.read(shared)

    def _call_method(self, name: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        all_arguments: list[tuple[object, ...] | None] = [None] * self.group.size
        all_arguments[self.ranks.start : self.ranks.stop] = arguments
        return self.group.call_method(name, all_arguments)[self.ranks.start : self.ranks.stop]


def _start_log(log: Path, rank: int) -> int:
    """Append a line to a rank's log, which keeps those of earlier runs, and return the offset after it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError), log.open("a") as file:  # a full disk must not end the run here
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank} begins", file=file)
    return log.stat().st_size if log.exists() else 0


def newest_heartbeats(
    address: StoreAddress, store: dist.Store, previous_heartbeats: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the last heartbeat of each rank, which is the same object if there is no newer one.

    Unsigned values are ignored, since anybody who reaches the store's port can write to it.
    """
    keys = [f"rank {rank}" for rank in range(len(previous_heartbeats))]
    heartbeats = []
    for key, written, previous in zip(keys, store.multi_get(keys), previous_heartbeats, strict=True):
        value = address.verified(key, written)
        heartbeat = previous if value is None else json.loads(value)
        heartbeats.append(heartbeat if heartbeat.get("beat", 0) > previous.get("beat", 0) else previous)
    return heartbeats


def _serve_store(host: str) -> dist.TCPStore:
    try:
        return serve_store(host)
    except OSError as error:
        raise RankFailed(
            f"this machine cannot listen at {host}, its address in the Ray cluster ({error.strerror}). Start Ray with "
            "--node-ip-address=ADDRESS, an address of this machine that the others can reach"
        ) from None


def _last_failure(status: Path) -> dict[str, Any]:
    """Return the error that ended the previous ranks, and its time."""
    with suppress(ValueError, KeyError, TypeError):
        status_tree = read_json(status, dict, "")
        return {"failure": str(status_tree["failure"]), "failed": float(status_tree["failed"])}
    return {"failure": None, "failed": None}


def _error_of(ref: Any) -> RayError | None:
    try:
        ray.get(ref)
    except RayError as error:
        return error
    return None


def _traceback_of(error: RayError) -> str:
    """Return the rank's traceback, for an error whose message does not explain itself."""
    lines = [line for line in str(error).splitlines() if line.startswith("  ")]
    return "".join(f"\n{line}" for line in lines)


def _lost_connection(error: Exception) -> bool:
    """Return whether a connection or a device failed rather than the computation; Gloo raises plain RuntimeErrors."""
    of_torch = isinstance(error, torch.distributed.DistError | torch.AcceleratorError)
    return of_torch or (isinstance(error, RuntimeError) and "gloo" in str(error))
