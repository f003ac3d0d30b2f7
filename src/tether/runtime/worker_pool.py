"""A pool of worker processes that answer requests while the caller does other things.

One thread per worker takes requests from a queue, sends them to the process, waits, and replaces the process if it
ends. A request that hangs, exits or forks only loses its own answer.
"""

from __future__ import annotations

import json
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from tether.runtime.interrupt import Interrupted
from tether.runtime.supervised import ProcessEnded, SupervisedProcess
from tether.runtime.threads import OMP_NUM_THREADS, num_threads

_MAX_STARTS = 3  # after this many failed starts, the answer of a request is an error
_MAX_BATCH = 64
_BATCHES_LEFT = (
    4  # batches per worker that remain queued: batches shrink towards the end, so that all workers finish together
)

Answer = TypeVar("Answer")
Queue = deque[tuple[int, bytes]]


class WorkersFailed(Exception):
    """A worker ended and could not be restarted, so some requests have no answer."""


@dataclass(frozen=True)
class Work(Generic[Answer]):
    """What the processes of a pool do, and how their messages are decoded."""

    serve: str
    """``module:function`` for `SupervisedProcess.spawn`. Its first message is the result of `begin`, to which it
    replies in JSON with any number of lists [next activity], used in messages, then with a string (an error) or an
    object, which becomes `WorkerPool.about`. Each later request is a pickled list of payloads, each of which has one
    answer."""
    begin: Callable[[Any], object]
    """Returns the first message, pickled, from `WorkerPool.about` (None for the first workers)."""
    name: str
    """Name of a worker for messages: "the process of the ..."."""
    load: Callable[[bytes], Answer]
    """Decodes an answer; raises a ValueError if it is invalid."""
    failed: Callable[[str, float], Answer]
    """Returns the answer of a request whose process ended, from the reason and the seconds."""
    limit: int
    """Maximum bytes of an answer."""
    max_heartbeat_seconds: float
    """Maximum seconds by which a heartbeat can extend a worker's deadline."""
    is_last: Callable[[Answer], bool] = lambda _: False
    """Whether a worker ends after an answer, so that it has to be replaced."""


class WorkerPool(Generic[Answer]):
    """Worker processes; use it as a context manager, or `close` it.

    Args:
        work: the work of the processes.
        num_workers: number of processes.
        timeout: maximum seconds from a request to its answer; then the process is killed.
        startup_timeout: maximum seconds to start, or for each activity that the worker reports.

    Raises:
        ValueError: a worker cannot start.
    """

    def __init__(self, work: Work[Answer], *, num_workers: int, timeout: float, startup_timeout: float = 60.0) -> None:
        assert num_workers > 0, num_workers
        assert timeout > 0, timeout
        self._work, self._timeout, self._startup_timeout = work, timeout, startup_timeout
        self._changed = threading.Condition()  # protects the fields below
        self._queue: Queue = deque()
        self._own: list[Queue] = [deque() for _ in range(num_workers)]  # requests for one specific worker
        self._submitted: set[int] = set()
        self._last_index = 0
        self._done: dict[int, Answer] = {}
        # How often the process of a request ended before it started the request.
        self._returned: Counter[int] = Counter()
        self._failure: BaseException | None = None
        self._closed = False
        self.about: Any = None
        """The object with which a worker replied to its first message."""
        self._workers = [self._start() for _ in range(num_workers)]
        try:
            for worker in self._workers:
                self._await_ready(worker)
        except BaseException:
            for worker in self._workers:
                worker.close()
            raise
        self._threads = [
            threading.Thread(target=self._drive, args=(slot,), name=f"worker-{slot}", daemon=True)
            for slot in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, index: int, payload: bytes, worker: int | None = None) -> None:
        """Submit a request, for any worker or for a specific one (modulo the number of workers)."""
        with self._changed:
            assert not self._closed, "the pool was closed"
            assert index not in self._submitted, f"request {index} was submitted twice"
            self._submitted.add(index)
            queue = self._queue if worker is None else self._own[worker % len(self._own)]
            queue.append((index, payload))
            self._changed.notify_all()

    def enqueue(self, payload: bytes, worker: int | None = None) -> int:
        """Submit a request like `put`, and return its index."""
        self._last_index += 1
        self.put(self._last_index, payload, worker)
        return self._last_index

    def answered(self) -> set[int]:
        """Return the requests whose answers `take` returns at once.

        Raises:
            WorkersFailed: a worker could not be restarted.
            Interrupted: a signal was received, and a request takes too long.
        """
        with self._changed:
            self._wait_for(lambda: True)
            return set(self._done)

    def take(self, index: int) -> Answer:
        """Wait for one answer and remove it.

        Raises:
            WorkersFailed: a worker could not be restarted.
            Interrupted: a signal was received, and a request takes too long.
        """
        with self._changed:
            self._wait_for(lambda: index in self._done)
            self._submitted.remove(index)
            self._returned.pop(index, None)
            return self._done.pop(index)

    def take_all(self) -> list[Answer]:
        """Wait for all remaining answers and remove them; they are ordered by index.

        Raises:
            WorkersFailed: a worker could not be restarted.
            Interrupted: a signal was received, and a request takes too long.
        """
        with self._changed:
            self._wait_for(lambda: len(self._done) == len(self._submitted))
            done = [self._done[index] for index in sorted(self._submitted)]
            self._submitted.clear()
            self._done.clear()
            self._returned.clear()
        return done

    def close(self) -> None:
        """Kill all workers and their descendants immediately, including running requests."""
        with self._changed:
            self._closed = True
            for worker in self._workers:
                worker.stop()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._failure or ready())
        if isinstance(self._failure, Interrupted):
            raise self._failure
        if self._failure:
            raise WorkersFailed(f"a worker of the {self._work.name} failed: {self._failure}") from self._failure

    def _drive(self, slot: int) -> None:
        """Process requests with one worker until the pool is closed; runs in a thread."""
        try:
            while batch := self._next(slot):
                self._run(slot, batch)
        except BaseException as error:  # noqa: BLE001 - whatever ends this thread, callers must not wait for it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._workers[slot].close()

    def _next(self, slot: int) -> list[tuple[int, bytes]]:
        """Return the next requests for one worker; empty when the pool is closed."""
        queue = self._own[slot]
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queue or queue)
            if self._closed:
                return []
            if queue:
                return [queue.popleft()]
            share = len(self._queue) // (_BATCHES_LEFT * len(self._workers))
            return [self._queue.popleft() for _ in range(min(max(share, 1), _MAX_BATCH))]

    def _run(self, slot: int, batch: list[tuple[int, bytes]]) -> None:
        """Let one worker answer `batch`. If it ends, its current request fails and the remaining ones are requeued."""
        worker, unanswered = self._workers[slot], deque(batch)
        try:
            worker.send(pickle.dumps([payload for _, payload in batch]), self._timeout)
            is_last = False
            while unanswered and not is_last:
                answer = self._work.load(worker.receive())
                self._record(unanswered.popleft()[0], answer)
                is_last = self._work.is_last(answer)
        except ProcessEnded as end:
            self._fail(slot, unanswered, end)
        except ValueError as error:
            self._fail(slot, unanswered, ProcessEnded(f"gave an answer that cannot be read ({error})"))
        else:
            if is_last:
                self._replace(slot, unanswered)

    def _record(self, index: int, answer: Answer) -> None:
        with self._changed:
            self._done[index] = answer
            self._changed.notify_all()

    def _fail(self, slot: int, unanswered: Queue, end: ProcessEnded) -> None:
        """Replace a worker that ended too early. Its current request fails if the worker had begun it."""
        first = unanswered[0][0]
        with self._changed:
            self._returned[first] += not end.begun
            is_error = end.begun or self._returned[first] == _MAX_STARTS
        self._replace(slot, [*unanswered][is_error:])
        if is_error:
            self._record(first, self._work.failed(f"the process of the {self._work.name} {end.reason}", end.seconds))

    def _replace(self, slot: int, unanswered: Sequence[tuple[int, bytes]]) -> None:
        """Replace a worker, unless the pool was closed, and queue its unanswered requests again."""
        self._workers[slot].close()
        with self._changed:
            if self._closed:
                return
            self._workers[slot] = self._start()
            self._queue.extendleft(reversed(unanswered))
            self._changed.notify_all()
        self._await_ready(self._workers[slot])

    def _start(self) -> SupervisedProcess:
        threads = max(1, num_threads() // len(self._own))
        # 0: sets have the same order in all workers
        environment = {"PYTHONHASHSEED": "0", OMP_NUM_THREADS: str(threads)}
        worker = SupervisedProcess.spawn(
            self._work.serve,
            limit=self._work.limit,
            max_heartbeat_seconds=self._work.max_heartbeat_seconds,
            environment=environment,
        )
        worker.send(pickle.dumps(self._work.begin(self.about)), self._startup_timeout)
        return worker

    def _await_ready(self, worker: SupervisedProcess) -> None:
        """Wait until a worker has started."""
        doing = f"loading the {self._work.name}"
        try:
            while isinstance(answer := json.loads(worker.receive()), list):
                (doing,) = answer
        except ProcessEnded as end:
            raise ValueError(f"{doing} failed: its process {end.reason}") from end
        if isinstance(answer, str):
            raise ValueError(answer)
        self.about = answer
