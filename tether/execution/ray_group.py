"""Worker processes as Ray actors in a placement group, one for each device of this machine."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tether.execution.worker import Worker
from tether.runtime.interrupt import give_up_if_interrupted
from tether.runtime.machine import usable_cores
from tether.runtime.ranks import RankFailed, RankLost

START_SECONDS, CALL_SECONDS = 300.0, 4 * 3600.0
"""How long the driver waits for processes to start, and for the answer of one call: a model that loads, an update."""
STARTS = 3
"""A machine under load may start Ray too slowly for Ray's own patience."""
LOOK_SECONDS, SILENT_LOOKS = 1.0, 180
"""While it waits the driver looks this often for signs of life of each rank; after so many without one the rank counts
as stopped. Looks are counted, not seconds: the driver may have been stopped with the ranks."""
SETTLE_SECONDS = 5.0
"""How long it may take to hear of a rank's death after another rank failed because of it."""
LINES = 5
OBJECT_STORE = 1 << 30  # bytes


class RayGroup:
    """Ranks in processes of their own, which end when this process does; see `tether.execution.Group`.

    Args:
        size: ranks; one for each device.
        device: ``cpu`` or ``cuda``.
        threads: CPU threads of all ranks together; None: one a core.
        logs: folder for what each rank prints.
        silent_looks: see `SILENT_LOOKS`.

    Raises:
        RankFailed: Ray or a rank does not start; `RankLost`, a rank dies meanwhile.
    """

    def __init__(
        self, size: int, device: str, threads: int | None, logs: Path, *, silent_looks: int = SILENT_LOOKS
    ) -> None:
        self.size = size
        self._silent_looks = silent_looks
        self._beats: list[int | None] = [None] * size
        self._silent = [0] * size
        """Looks since the last sign of life."""
        self._pids: list[int] = []
        self._logs = [logs / f"rank_{rank}.log" for rank in range(size)]
        self._failure: RankFailed | None = None
        self._actors: list[Any] = []
        _start(size, device)
        try:
            self._launch(device, max(1, (threads or usable_cores()) // size))
        except BaseException:
            self.close()
            raise

    def _launch(self, device: str, threads: int) -> None:
        """Start the ranks, which then know each other."""
        size, gpus = self.size, int(device == "cuda")
        group = placement_group([{"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}] * size, strategy="STRICT_PACK")
        try:
            ray.get(group.ready(), timeout=START_SECONDS)
        except GetTimeoutError:
            raise RankFailed(
                f"trainer.n_gpus_per_node={size}: no room for as many ranks within {START_SECONDS:g} s; Ray has "
                f"{ray.available_resources()}. Ask for fewer."
            ) from None
        actors = ray.remote(Worker)
        self._actors = [
            actors.options(
                num_cpus=1,
                num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},  # Ray would set 1
            ).remote(rank, threads, self._logs[rank])
            for rank in range(size)
        ]
        self._pids = self._answers("pid", [()] * size, START_SECONDS)
        address = self._answers("address", [(), *[None] * (size - 1)], START_SECONDS)[0]
        self._answers("join", [(address, size, device)] * size, START_SECONDS)

    def build(self, factory: Callable[..., Mapping[str, Any]], *arguments: Any) -> None:
        """Have a factory, which is named by its module, make the parts on every rank."""
        self._answers("build", [(factory, arguments)] * self.size, CALL_SECONDS)

    def call(self, part: str, method: str, arguments: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """See `tether.execution.Group`."""
        of_ranks = [None if given is None else (part, method, *given) for given in arguments]
        return self._answers("call", of_ranks, CALL_SECONDS)

    def share(self, value: Any) -> Any:
        """See `tether.execution.Group`."""
        return ray.put(value)

    def close(self) -> None:
        """End all ranks, and Ray; once this is back, none of them is there."""
        for actor in self._actors:
            ray.kill(actor)
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # one that is stopped does not hear of Ray's end
        ray.shutdown()

    def _answers(self, name: str, arguments: Sequence[tuple[Any, ...] | None], seconds: float) -> list[Any]:
        if self._failure:
            raise self._failure
        calls = {
            getattr(actor, name).remote(*given): rank
            for rank, (actor, given) in enumerate(zip(self._actors, arguments, strict=True))
            if given is not None
        }
        answers: list[Any] = [None] * self.size
        waiting, until = list(calls), time.monotonic() + seconds
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=LOOK_SECONDS)
            if not ready:
                self._look()
            if not ready and time.monotonic() > until:
                late = ", ".join(str(calls[ref]) for ref in waiting)
                raise self._failed(f"rank {late} gave no answer to {name} within {seconds:g} s", calls[waiting[0]])
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
        for rank, log in enumerate(self._logs):
            beat = log.stat().st_mtime_ns if log.exists() else None
            self._silent[rank] = self._silent[rank] + 1 if beat is not None and beat == self._beats[rank] else 0
            self._beats[rank] = beat
        silent = max(self._silent)
        rank = self._silent.index(silent)
        give_up_if_interrupted(time.monotonic() - silent * LOOK_SECONDS, f"rank {rank} gave no sign of life")
        if silent >= self._silent_looks:
            raise self._failed(f"rank {rank} is stopped: no sign of life for {silent * LOOK_SECONDS:g} s", rank)

    def _reason(self, calls: Mapping[Any, int]) -> RankFailed:
        """Which rank failed first; others that wait for it fail, too, and may be heard of before it."""
        settled, _ = ray.wait(list(calls), num_returns=len(calls), timeout=SETTLE_SECONDS)
        errors = {calls[ref]: error for ref in settled if (error := _error_of(ref))}
        for rank, error in errors.items():
            if isinstance(error, RayActorError):
                return self._failed(f"rank {rank} died ({str(error).strip().splitlines()[-1].strip()})", rank)
        rank, error = next(iter(errors.items()))
        cause = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error
        kind = "" if isinstance(cause, ValueError) else f"{type(cause).__name__}: "
        return self._failed(f"rank {rank}: {kind}{cause}", None, RankLost if _lost_the_others(cause) else RankFailed)

    def _failed(self, what: str, rank: int | None, kind: type[RankFailed] = RankLost) -> RankFailed:
        """After a failure the ranks no longer are at the same place, so that every later call fails, too."""
        lines = self._logs[rank].read_text(errors="replace").splitlines() if rank is not None else []
        shown = "".join(f"\n  {line}" for line in lines[-LINES:])
        last = f". Its last lines, of {self._logs[rank]}:{shown}" if rank is not None and lines else ""
        self._failure = kind(what + last)
        return self._failure


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


def _start(size: int, device: str) -> None:
    """Start Ray on this machine; workers import from where this process does."""
    for attempt in range(STARTS):
        try:
            with _signals_kept():
                ray.init(
                    address="local",
                    num_cpus=max(size, usable_cores()) if device == "cpu" else None,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=OBJECT_STORE,
                )
        except Exception as error:  # Ray raises many kinds
            ray.shutdown()
            if attempt == STARTS - 1:
                raise RankFailed(f"Ray does not start on this machine ({type(error).__name__}: {error})") from error
        else:
            return


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM and `breakpoint` over for good."""
    term, debugger = signal.getsignal(signal.SIGTERM), os.environ.get("PYTHONBREAKPOINT")
    yield
    if signal.getsignal(signal.SIGTERM) is not term:
        signal.signal(signal.SIGTERM, term)
    if debugger is None:
        os.environ.pop("PYTHONBREAKPOINT", None)
