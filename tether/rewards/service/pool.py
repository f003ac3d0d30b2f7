"""Scores responses in worker processes, while generation still runs.

One thread per worker takes requests from a shared queue, hands them to its process and waits; it replaces a process
that ended. A call that hangs, exits or forks costs its own row an error and nothing else.
"""

from __future__ import annotations

import json
import pickle
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from tether.rewards.custom import CustomReward
from tether.rewards.outcome import MAX_ANSWER, RewardError, RewardFailure, RewardOutcome, RewardRequest, load_answer
from tether.rewards.sandbox.options import ProgramOptions
from tether.runtime.interrupt import Interrupted
from tether.runtime.supervised import ProcessEnded, SupervisedProcess

_WORKER = "tether.rewards.service.worker:serve"
_MAX_STARTS = 3  # processes that may end before they begin a request, until that is an error of its row
_MAX_BATCH = 64
_BATCHES_LEFT = 4  # per worker: batches shrink towards the end of the queue, so that all workers finish together


class RewardPool:
    """Worker processes that score responses; use it as a context manager, or `close` it.

    Args:
        custom: the user's function; None scores by `data_source` (`tether.rewards.router`).
        num_workers: processes.
        timeout: seconds from a request to its answer, after which the process is killed.
        startup_timeout: seconds that loading the user's function may take.
        programs: how rules that run programs do it; None: as by default.

    Raises:
        ValueError: the user's function cannot be loaded.
    """

    def __init__(
        self,
        custom: CustomReward | None = None,
        *,
        num_workers: int,
        timeout: float,
        startup_timeout: float = 60.0,
        programs: ProgramOptions | None = None,
    ) -> None:
        assert num_workers > 0, num_workers
        assert timeout > 0, timeout
        self._custom, self._timeout, self._startup_timeout = custom, timeout, startup_timeout
        self._programs = programs or ProgramOptions()
        self._changed = threading.Condition()  # guards everything below
        self._queue: deque[tuple[int, bytes]] = deque()
        self._submitted: set[int] = set()
        self._done: dict[int, tuple[RewardOutcome, float]] = {}
        self._durations: list[float] = []
        self._returned: Counter[int] = Counter()  # how often the process of a request ended before it began it
        self._failure: BaseException | None = None
        self._closed = False
        self._workers = [self._start() for _ in range(num_workers)]
        try:
            for worker in self._workers:
                _await_ready(worker)
        except BaseException:
            for worker in self._workers:
                worker.close()
            raise
        self._threads = [
            threading.Thread(target=self._drive, args=(slot,), name=f"reward-{slot}", daemon=True)
            for slot in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def durations(self) -> list[float]:
        """Seconds of each call of the last `collect`, in its order."""
        return self._durations

    def submit(self, index: int, request: RewardRequest) -> None:
        """Have `request` scored; `collect` returns its outcome at the place that `index` has among the others."""
        payload = pickle.dumps(replace(request, dialogue=None))
        with self._changed:
            assert not self._closed, "the pool was closed"
            assert index not in self._submitted, f"request {index} was submitted twice"
            self._submitted.add(index)
            self._queue.append((index, payload))
            self._changed.notify_all()

    def collect(self) -> list[RewardOutcome]:
        """Wait for everything submitted since the last call; outcomes ordered by index.

        Raises:
            RewardFailure: a worker ended and could not be started again, so some requests have no outcome.
            Interrupted: a signal asks the run to stop, and a call takes long.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or len(self._done) == len(self._submitted))
            if isinstance(self._failure, Interrupted):
                raise self._failure
            if self._failure:
                raise RewardFailure(f"a reward worker failed: {self._failure}") from self._failure
            done = [self._done[index] for index in sorted(self._submitted)]
            self._submitted.clear()
            self._done.clear()
            self._returned.clear()
        self._durations = [seconds for _, seconds in done]
        return [outcome for outcome, _ in done]

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """Score all `requests` and wait for the outcomes, in the same order."""
        for index, request in enumerate(requests):
            self.submit(index, request)
        return self.collect()

    def close(self) -> None:
        """End all workers at once, running calls too, with every process that they started."""
        with self._changed:
            self._closed = True
            for worker in self._workers:
                worker.stop()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drive(self, slot: int) -> None:
        """Thread of one worker: take requests until the pool is closed."""
        try:
            while batch := self._take():
                self._run(slot, batch)
        except BaseException as error:  # noqa: BLE001 - whatever ends this thread, `collect` must not wait for it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._workers[slot].close()

    def _take(self) -> list[tuple[int, bytes]]:
        """The next requests for one worker; empty when the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queue)
            if self._closed:
                return []
            share = len(self._queue) // (_BATCHES_LEFT * len(self._workers))
            return [self._queue.popleft() for _ in range(min(max(share, 1), _MAX_BATCH))]

    def _run(self, slot: int, batch: list[tuple[int, bytes]]) -> None:
        """Have one worker score `batch`. If it ends, the call it was at is an error and the rest is queued again."""
        worker, unanswered = self._workers[slot], deque(batch)
        try:
            worker.send(pickle.dumps([payload for _, payload in batch]), self._timeout)
            while unanswered:
                outcome, seconds = load_answer(worker.receive())
                self._record(unanswered.popleft()[0], outcome, seconds)
        except ProcessEnded as end:
            self._replace(slot, unanswered, end)
        except ValueError as error:
            self._replace(slot, unanswered, ProcessEnded(f"gave an answer that cannot be read ({error})"))

    def _record(self, index: int, outcome: RewardOutcome, seconds: float) -> None:
        with self._changed:
            self._done[index] = (outcome, seconds)
            self._changed.notify_all()

    def _replace(self, slot: int, unanswered: deque[tuple[int, bytes]], end: ProcessEnded) -> None:
        """Start a worker in the place of one that ended, unless the pool was closed; nothing it never began is lost."""
        self._workers[slot].close()
        first = unanswered[0][0]
        with self._changed:
            if self._closed:
                return
            self._workers[slot] = self._start()
            self._returned[first] += not end.begun
            is_error = end.begun or self._returned[first] == _MAX_STARTS
            self._queue.extendleft(reversed([*unanswered][is_error:]))
            self._changed.notify_all()
        _await_ready(self._workers[slot])
        if is_error:
            self._record(first, RewardError(f"the process of the reward function {end.reason}"), end.seconds)

    def _start(self) -> SupervisedProcess:
        # Sets of strings have one order in all workers.
        worker = SupervisedProcess.spawn(_WORKER, limit=MAX_ANSWER, environment={"PYTHONHASHSEED": "0"})
        worker.send(pickle.dumps((self._custom, self._programs, self._timeout)), self._startup_timeout)
        return worker


def _await_ready(worker: SupervisedProcess) -> None:
    """Wait until the reward function is loaded.

    Raises:
        ValueError: it cannot be loaded, or not in time.
    """
    try:
        problem: str | None = json.loads(worker.receive())
    except ProcessEnded as end:
        raise ValueError(f"loading the reward function failed: its process {end.reason}") from end
    if problem is not None:
        raise ValueError(problem)
