"""The thread of a rank that writes its share of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Writing:
    """Runs one job at a time in a thread; errors of writing files are returned, since the rank can go on after them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._job: Future[None] | None = None

    def begin(self, job: Callable[[], None]) -> None:
        """Start a job."""
        self._job = self._thread.submit(job)

    def answer(self) -> tuple[bool, BaseException | None]:
        """Return whether the job is done, and its error if it failed."""
        if self._job is None or not self._job.done():
            return self._job is None, None
        return True, self._job.exception()
