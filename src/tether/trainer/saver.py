"""Completes checkpoints, either immediately or in a thread while training continues (``trainer.async_save``)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

Complete = Callable[[], Path]
OnSaved = Callable[[int, Path], None]


class Saver:
    """Writes one checkpoint at a time; `collect` raises the errors of writing.

    Args:
        background: whether to write in a thread.
    """

    def __init__(self, background: bool = False) -> None:
        self.background = background
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._step = 0
        self._pending: Future[Path] | None = None

    def submit(self, step: int, complete: Complete) -> None:
        """Complete the checkpoint of a step; earlier ones must have been collected."""
        assert self._pending is None
        self._step, self._pending = step, self._thread.submit(complete) if self.background else _done(complete())

    def collect(self, on_saved: OnSaved, *, wait: bool) -> None:
        """Call `on_saved` if the submitted checkpoint is complete; `wait` waits until it is."""
        if self._pending is None or not (wait or self._pending.done()):
            return
        pending, self._pending = self._pending, None
        on_saved(self._step, pending.result())

    def close(self) -> None:
        """Wait for the thread to finish."""
        self._thread.shutdown()


def _done(path: Path) -> Future[Path]:
    future: Future[Path] = Future()
    future.set_result(path)
    return future
