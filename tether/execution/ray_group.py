"""Worker processes as Ray actors in a placement group, one for each device, on one node or on several."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tether.execution.cluster import LOOK_SECONDS, check_versions, connect, is_local, room
from tether.execution.worker import Process, Worker, this_process
from tether.runtime.interrupt import give_up_if_interrupted
from tether.runtime.machine import usable_cores
from tether.runtime.ranks import STATUS, RankFailed, RankLost
from tether.training import MicroBatchTooLarge

__all__ = ["RayGroup", "is_local"]

START_SECONDS, CALL_SECONDS = 300.0, 4 * 3600.0
"""Seconds that the driver waits for room and for processes to start, and for the answer of one call: a model that
loads, an update."""
SILENT_LOOKS = 180
"""While it waits the driver looks each second for signs of life of each rank; after so many without one the rank counts
as stopped. Looks are counted, not seconds: the driver may have been stopped with the ranks."""
STACK_SECONDS = 1.0
"""Seconds that ranks have to write their stacks."""
SETTLE_SECONDS = 5.0
"""Seconds until the death of a rank is heard of after another rank failed because of it."""
LINES = 5


class RayGroup:
    """Ranks in processes of their own, which end when this process does; see `tether.execution.Group`.

    Args:
        per_node: ranks on each node; one for each device.
        device: ``cpu`` or ``cuda``.
        threads: CPU threads of all ranks of a node together; None: one a core.
        logs: folder for what each rank prints.
        nodes: how many.
        options: of ``ray.init``, see `tether.execution.cluster.connect`.
        start_seconds: see `START_SECONDS`.
        silent_looks: see `SILENT_LOOKS`.

    Raises:
        RankFailed: Ray or a rank does not start; `RankLost`, a rank dies meanwhile.
    """

    def __init__(
        self,
        per_node: int,
        device: str,
        threads: int | None,
        logs: Path,
        *,
        nodes: int = 1,
        options: Mapping[str, Any] | None = None,
        start_seconds: float = START_SECONDS,
        silent_looks: int = SILENT_LOOKS,
    ) -> None:
        self.size = size = nodes * per_node
        self._seconds, self._silent_looks = start_seconds, silent_looks
        self._beats = [b""] * size
        self._status = logs.absolute() / Path(STATUS).name
        self._silent = [0] * size
        """Looks since the last sign of life."""
        self._processes: list[Process] = []
        self._logs = [logs.absolute() / f"rank_{rank}.log" for rank in range(size)]
        self._failure: RankFailed | None = None
        self._one_at_a_time = threading.Lock()  # a thread asks whether a checkpoint is written
        self._room: Any = None
        self._actors: list[Any] = []
        host = connect(nodes, per_node, device, options or {})
        try:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            for rank in range(size):
                self._store.set(f"rank {rank}", "")
            self._room = room(nodes, per_node, device, start_seconds)
            self._launch(per_node, device, max(1, (threads or usable_cores()) // per_node), host)
        except BaseException:
            self.close()
            raise

    def _launch(self, per_node: int, device: str, threads: int, host: str) -> None:
        """Start the ranks, which then know each other."""
        size, actors = self.size, ray.remote(Worker)
        self._actors = [
            actors.options(
                num_cpus=1,
                num_gpus=int(device == "cuda"),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._room, placement_group_bundle_index=rank // per_node
                ),
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},  # Ray would set 1
            ).remote(rank, threads, self._logs[rank], Path.cwd(), (host, self._store.port))
            for rank in range(size)
        ]
        self._processes = self._answers("process", [()] * size, self._seconds)
        check_versions(this_process(), self._processes)
        self._answers("join", [(size, device)] * size, self._seconds)

    def build(self, factory: Callable[..., Mapping[str, Any]], *arguments: object) -> None:
        """Have a factory, which is named by its module, make the parts on every rank."""
        self._answers("build", [(factory, arguments)] * self.size, CALL_SECONDS)

    def call(self, part: str, method: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        """See `tether.execution.Group`."""
        of_ranks = [None if given is None else (part, method, *given) for given in arguments]
        return self._answers("call", of_ranks, CALL_SECONDS)

    def share(self, value: object) -> object:
        """See `tether.execution.Group`."""
        return ray.put(value)

    def close(self) -> None:
        """End all ranks, and Ray where it was started for them; once this is back, none of them is there."""
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor)
        self._signal(signal.SIGKILL)  # one that is stopped does not hear of Ray's end
        if self._room is not None:
            remove_placement_group(self._room)
        self._actors, self._room, self._failure = [], None, None  # see `connect`
        ray.shutdown()

    def _signal(self, number: int) -> None:
        """Send a signal to the ranks of this machine."""
        here = this_process().machine
        for process in self._processes:
            if process.machine == here:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _answers(self, name: str, arguments: Sequence[tuple[object, ...] | None], seconds: float) -> list[Any]:
        with self._one_at_a_time:
            return self._answers_now(name, arguments, seconds)

    def _answers_now(self, name: str, arguments: Sequence[tuple[object, ...] | None], seconds: float) -> list[Any]:
        if self._failure:
            raise self._failure
        calls = {
            getattr(actor, name).remote(*given): rank
            for rank, (actor, given) in enumerate(zip(self._actors, arguments, strict=True))
            if given is not None
        }
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
            try:
                for ref in ready:
                    answers[calls[ref]] = ray.get(ref)
            except RayError:
                raise self._reason(calls) from None
        return answers

    def _look(self) -> None:
        """Look for a sign of life of each rank.

        Raises:
            RankLost: one gave none for too long.
            Interrupted: the run is asked to stop, and one is silent.
        """
        beats = self._store.multi_get([f"rank {rank}" for rank in range(self.size)])
        for rank, beat in enumerate(beats):
            self._silent[rank] = self._silent[rank] + 1 if beat and beat == self._beats[rank] else 0
        self._beats = beats
        self._note()
        silent = max(self._silent)
        rank = self._silent.index(silent)
        give_up_if_interrupted(time.monotonic() - silent * LOOK_SECONDS, f"{self._name(rank)} gave no sign of life")
        if silent >= self._silent_looks:
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
            return self._failed(what, None, RankFailed)
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
        signs = [
            json.loads(beat) for beat in self._store.multi_get([f"rank {rank}" for rank in range(self.size)]) if beat
        ]
        if len(signs) < self.size or not self._processes:
            return
        ranks = [
            sign | {"rank": rank, "process": f"{process.pid} on {process.host}", "silent": self._silent[rank]}
            for rank, (sign, process) in enumerate(zip(signs, self._processes, strict=True))
        ]
        failure = str(self._failure) if self._failure else None
        with suppress(OSError):  # a full disk ends no run for this
            whole = self._status.with_suffix(".new")
            whole.write_text(json.dumps({"time": time.time(), "failure": failure, "ranks": ranks}))
            whole.replace(self._status)

    def _failed(self, what: str, rank: int | None, kind: type[RankFailed] = RankLost) -> RankFailed:
        """After a failure the ranks no longer are at the same place, so that every later call fails, too."""
        log = self._logs[rank] if rank is not None else None
        lines = log.read_text(errors="replace").splitlines() if log and log.exists() else []
        shown = "".join(f"\n  {line}" for line in lines[-LINES:])
        last = f". Its last lines, of {log}:{shown}" if lines else ""
        return self._ended(kind(what + last))

    def _ended(self, failure: RankFailed) -> RankFailed:
        self._failure = failure
        self._note()
        return failure


def _error_of(ref: Any) -> RayError | None:
    try:
        ray.get(ref)
    except RayError as error:
        return error
    return None


def _lost_the_others(error: Exception) -> bool:
    """Whether a connection or a device failed, not what was computed: Gloo raises plain RuntimeErrors."""
    of_torch = isinstance(error, torch.distributed.DistError | torch.AcceleratorError)
    return of_torch or (isinstance(error, RuntimeError) and "gloo" in str(error))
