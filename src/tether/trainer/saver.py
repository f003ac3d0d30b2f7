"""Completes checkpoints: at once, or in a thread while training goes on (``trainer.async_save``)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

Complete = Callable[[], Path]
OnSaved = Callable[[int, Path], None]


class Saver:
    """One checkpoint at a time, each whole before the next begins; errors are those of `collect`.

    Args:
        later: in a thread.
    """

    def __init__(self, later: bool = False) -> None:
        self.later = later
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._step = 0
        self._pending: Future[Path] | None = None

    def take(self, step: int, complete: Complete) -> None:
        """Complete the checkpoint of a step; those before must have been collected."""
        assert self._pending is None
        self._step, self._pending = step, self._thread.submit(complete) if self.later else _done(complete())

    def collect(self, on_saved: OnSaved, *, wait: bool) -> None:
        """Tell of the checkpoint that was taken once it is complete; with `wait` it is then, else it may not be yet."""
        if self._pending is None or not (wait or self._pending.done()):
            return
        pending, self._pending = self._pending, None
        on_saved(self._step, pending.result())

    def close(self) -> None:
        """Wait for the thread; what it still completes is whole or absent."""
        self._thread.shutdown()


def _done(path: Path) -> Future[Path]:
    future: Future[Path] = Future()
    future.set_result(path)
    return future
