"""Worker processes that answer requests, while the caller does other things.

One thread per worker takes requests from a queue, hands them to its process and waits; it replaces a process that
ended. A request that hangs, exits or forks costs its own answer and nothing else.
"""

from __future__ import annotations

import json
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from tether.runtime.interrupt import Interrupted
from tether.runtime.supervised import ProcessEnded, SupervisedProcess
from tether.runtime.threads import OMP_NUM_THREADS, num_threads

_MAX_STARTS = 3  # processes that may end before they begin a request, until that is an error of its answer
_MAX_BATCH = 64
_BATCHES_LEFT = 4  # per worker: batches shrink towards the end of the queue, so that all workers finish together

Answer = TypeVar("Answer")
Queue = deque[tuple[int, bytes]]


class WorkersFailed(Exception):
    """A worker ended and could not be started again, so some requests have no answer."""


@dataclass(frozen=True)
class Work(Generic[Answer]):
    """The work of a pool."""

    serve: str
    """``module:function``, for `SupervisedProcess.spawn`. It receives what `begin` gives, and answers in JSON: with any
    number of lists [what it does next], for messages, then with a string, what is wrong, or with what it has to say
    (`WorkerPool.about`). Every later request is a pickled list of payloads, each with an answer of its own."""
    begin: Callable[[Any], object]
    """Of `WorkerPool.about`, or None for the first workers; pickled."""
    name: str
    """For messages: the process of the ..."""
    load: Callable[[bytes], Answer]
    """Reads an answer; raises ValueError where it is none."""
    failed: Callable[[str, float], Answer]
    """The answer of a request that ended its process: why, and after how many seconds."""
    limit: int
    """Bytes of the longest answer."""
    longest_beat: float
    """Seconds up to an answer that a worker may ask for, at most."""


class WorkerPool(Generic[Answer]):
    """Worker processes; use it as a context manager, or `close` it.

    Args:
        work: what they do.
        num_workers: processes.
        timeout: seconds from a request to its answer, after which the process is killed.
        startup_timeout: seconds that `Work.begin` may take, or each part of it that the worker announces.

    Raises:
        ValueError: a worker cannot begin.
    """

    def __init__(self, work: Work[Answer], *, num_workers: int, timeout: float, startup_timeout: float = 60.0) -> None:
        assert num_workers > 0, num_workers
        assert timeout > 0, timeout
        self._work, self._timeout, self._startup_timeout = work, timeout, startup_timeout
        self._changed = threading.Condition()  # guards everything below
        self._queue: Queue = deque()
        self._own: list[Queue] = [deque() for _ in range(num_workers)]  # requests that only this worker may take
        self._submitted: set[int] = set()
        self._done: dict[int, Answer] = {}
        self._returned: Counter[int] = Counter()  # how often the process of a request ended before it began it
        self._failure: BaseException | None = None
        self._closed = False
        self.about: Any = None
        """The first message of a worker."""
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
        """Have a request answered, by a certain worker (taken modulo their number) or by any."""
        with self._changed:
            assert not self._closed, "the pool was closed"
            assert index not in self._submitted, f"request {index} was submitted twice"
            self._submitted.add(index)
            queue = self._queue if worker is None else self._own[worker % len(self._own)]
            queue.append((index, payload))
            self._changed.notify_all()

    def take(self, index: int) -> Answer:
        """Wait for one answer, which nobody else can take then.

        Raises:
            WorkersFailed: a worker could not be started again.
            Interrupted: a signal asks the run to stop, and a request takes long.
        """
        with self._changed:
            self._wait_for(lambda: index in self._done)
            self._submitted.remove(index)
            self._returned.pop(index, None)
            return self._done.pop(index)

    def take_all(self) -> list[Answer]:
        """Wait for all answers that nobody has taken, ordered by index.

        Raises:
            WorkersFailed: a worker could not be started again.
            Interrupted: a signal asks the run to stop, and a request takes long.
        """
        with self._changed:
            self._wait_for(lambda: len(self._done) == len(self._submitted))
            done = [self._done[index] for index in sorted(self._submitted)]
            self._submitted.clear()
            self._done.clear()
            self._returned.clear()
        return done

    def close(self) -> None:
        """End all workers at once, running requests too, with every process that they started."""
        with self._changed:
            self._closed = True
            for worker in self._workers:
                worker.stop()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._failure or ready())
        if isinstance(self._failure, Interrupted):
            raise self._failure
        if self._failure:
            raise WorkersFailed(f"a worker of the {self._work.name} failed: {self._failure}") from self._failure

    def _drive(self, slot: int) -> None:
        """Thread of one worker: take requests until the pool is closed."""
        try:
            while batch := self._next(slot):
                self._run(slot, batch)
        except BaseException as error:  # noqa: BLE001 - whatever ends this thread, nobody must wait for it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._workers[slot].close()

    def _next(self, slot: int) -> list[tuple[int, bytes]]:
        """The next requests for one worker; empty when the pool is closed."""
        own = self._own[slot]
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queue or own)
            if self._closed:
                return []
            if own:
                return [own.popleft()]
            share = len(self._queue) // (_BATCHES_LEFT * len(self._workers))
            return [self._queue.popleft() for _ in range(min(max(share, 1), _MAX_BATCH))]

    def _run(self, slot: int, batch: list[tuple[int, bytes]]) -> None:
        """Have one worker answer `batch`. If it ends, the request it was at failed and the rest is queued again."""
        worker, unanswered = self._workers[slot], deque(batch)
        try:
            worker.send(pickle.dumps([payload for _, payload in batch]), self._timeout)
            while unanswered:
                answer = self._work.load(worker.receive())
                self._record(unanswered.popleft()[0], answer)
        except ProcessEnded as end:
            self._replace(slot, unanswered, end)
        except ValueError as error:
            self._replace(slot, unanswered, ProcessEnded(f"gave an answer that cannot be read ({error})"))

    def _record(self, index: int, answer: Answer) -> None:
        with self._changed:
            self._done[index] = answer
            self._changed.notify_all()

    def _replace(self, slot: int, unanswered: Queue, end: ProcessEnded) -> None:
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
        self._await_ready(self._workers[slot])
        if is_error:
            self._record(first, self._work.failed(f"the process of the {self._work.name} {end.reason}", end.seconds))

    def _start(self) -> SupervisedProcess:
        threads = max(1, num_threads() // len(self._own))
        environment = {"PYTHONHASHSEED": "0", OMP_NUM_THREADS: str(threads)}  # 0: sets of strings have one order in all
        worker = SupervisedProcess.spawn(
            self._work.serve,
            limit=self._work.limit,
            longest_beat=self._work.longest_beat,
            environment=environment,
        )
        worker.send(pickle.dumps(self._work.begin(self.about)), self._startup_timeout)
        return worker

    def _await_ready(self, worker: SupervisedProcess) -> None:
        """Wait until a worker has begun.

        Raises:
            ValueError: it cannot begin, or not in time.
        """
        doing = f"loading the {self._work.name}"
        try:
            while isinstance(said := json.loads(worker.receive()), list):
                (doing,) = said
        except ProcessEnded as end:
            raise ValueError(f"{doing} failed: its process {end.reason}") from end
        if isinstance(said, str):
            raise ValueError(said)
        self.about = said
