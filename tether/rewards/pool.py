"""Scores responses in worker processes, while generation still runs.

One thread a worker takes requests from a shared queue, hands them to its process and waits; it replaces a process that
died. A call that hangs, exits or forks costs its own row an error and nothing else.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from tether.rewards.custom import CustomReward
from tether.rewards.outcome import RewardError, RewardFailure, RewardOutcome, RewardRequest
from tether.rewards.process import WorkerDied, WorkerProcess

_MAX_BATCH = 64
_BATCHES_LEFT = 4  # per worker: batches shrink towards the end of the queue, so that all workers finish together


class RewardPool:
    """Worker processes that score responses; use it as a context manager, or `close` it.

    Args:
        custom: the user's function; None scores by `data_source` (`tether.rewards.router`).
        num_workers: processes.
        timeout: seconds that one call may take before it is killed.
        startup_timeout: seconds that loading the user's function may take.

    Raises:
        ValueError: the user's function cannot be loaded.
    """

    def __init__(
        self, custom: CustomReward | None = None, *, num_workers: int, timeout: float, startup_timeout: float = 60.0
    ) -> None:
        assert num_workers > 0, num_workers
        assert timeout > 0, timeout
        self._custom, self._timeout, self._startup_timeout = custom, timeout, startup_timeout
        self._changed = threading.Condition()  # guards everything below
        self._queue: deque[tuple[int, bytes]] = deque()
        self._submitted: set[int] = set()
        self._done: dict[int, tuple[RewardOutcome, float]] = {}
        self._durations: list[float] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._workers = [WorkerProcess(custom, timeout) for _ in range(num_workers)]
        try:
            for worker in self._workers:
                worker.await_ready(startup_timeout)
        except ValueError:
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
        payload = pickle.dumps(request)
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
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or len(self._done) == len(self._submitted))
            if self._failure:
                raise RewardFailure(f"a reward worker failed: {self._failure}") from self._failure
            done = [self._done[index] for index in sorted(self._submitted)]
            self._submitted.clear()
            self._done.clear()
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
        """Have one worker score `batch`. If it dies, the call it was at is an error and the rest is queued again."""
        unanswered = deque(batch)
        try:
            for outcome, seconds in self._workers[slot].run([payload for _, payload in batch]):
                self._record(unanswered.popleft()[0], outcome, seconds)
        except WorkerDied as death:
            self._replace(slot)
            with self._changed:
                self._queue.extendleft(reversed([*unanswered][1:]))
            self._record(unanswered[0][0], RewardError(death.verdict.reason), death.verdict.seconds)

    def _record(self, index: int, outcome: RewardOutcome, seconds: float) -> None:
        with self._changed:
            self._done[index] = (outcome, seconds)
            self._changed.notify_all()

    def _replace(self, slot: int) -> None:
        """Start a new worker in the place of a dead one, unless the pool was closed meanwhile."""
        self._workers[slot].close()
        with self._changed:
            if self._closed:
                return
            self._workers[slot] = WorkerProcess(self._custom, self._timeout)
        self._workers[slot].await_ready(self._startup_timeout)
