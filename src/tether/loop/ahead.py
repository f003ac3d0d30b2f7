"""Asynchronous training: the next batches are sampled while the policy learns.

One thread samples one batch after the other, with its own copy of the weights::

    sampler    batch 1 │ batch 2 (0 updates) │ batch 3 (1 update) │ batch 4 (2 updates) │
    trainer            │ step 1              │ step 2             │ step 3              │

At the beginning of step k the batches up to k + `max_staleness` are requested, so that a batch is at most
`max_staleness` updates older than the policy that learns from it. With `fixed`, a batch is sampled with the weights at
the time of its request, which makes the run a function of its inputs. Otherwise it is sampled with the newest weights
at the time when the sampler begins it, which depends on timing.

With `partial` the sampler also loads newer weights within a batch, whenever one of its responses ends, and the
unfinished responses continue with them. The age of a batch is counted from the weights that began it, so the bound
holds for every token.

A checkpoint contains the batches that wait for their step. With `fixed` it also waits for the batch in progress, so
that a resumed run is bitwise equal to an uninterrupted one; otherwise the resumed run samples that batch again, with
the weights of the checkpoint. All batches are sampled again if their settings differ from those of the resumed run.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Self

from tether.batch import WeightUpdate
from tether.checkpoints import as_bytes, from_tree, load_state, to_tree
from tether.loop.protocol import (
    Batch,
    CheckpointExtras,
    Details,
    EvaluationResult,
    Experience,
    Progress,
    Rollouts,
    Source,
)
from tether.metrics.timing import Timer
from tether.runtime.disk import ANOTHER_CHECKPOINT, reading
from tether.types import StateDict

FILE = "ahead.pt"
"""The file of a checkpoint that stores the batches waiting for their step."""
OLD_FILE = "ahead.pkl"
"""The pickle that earlier versions wrote instead; it is not read, since loading a pickle can run code."""
POLL_SECONDS = 0.1
"""Interval of progress updates while a step waits for its batch."""


class _SamplingCancelled(Exception):
    """Raised in the sampler when the run ends and the batch in progress is no longer needed."""


@dataclass(frozen=True)
class _Drawn(Generic[Batch, Details]):
    """A sampled batch that waits for its step."""

    # Checkpoints contain the names of this class and its fields, so renaming them breaks loading.

    step: int
    experience: Experience[Batch, Details]
    version: int
    """The version of the weights with which the batch was begun."""
    position: StateDict
    """The state of the source after the batch."""


class SamplingAhead(Generic[Batch, Details]):
    """Rollouts that sample ahead of the loop, as a `tether.loop.protocol.Rollouts`.

    Args:
        source: provides the tasks of each step; the sampler calls it in the order of steps.
        rollouts: samples, scores and evaluates; its weights must not be changed in place by training.
        export: returns the current weights of the policy.
        total_steps: steps of the run; nothing is sampled for later steps.
        max_staleness: maximum number of updates between the weights that sample a batch and those that learn from it,
            at least 1.
        fixed: whether a batch is sampled with the weights at the time of its request.
        partial: whether newer weights are loaded within a batch; not with `fixed`.
        is_compatible: returns whether the batches of a checkpoint were sampled with the settings of this run.
        classes: classes of the objects in a batch and its details, as for `tether.checkpoints.to_tree`.
    """

    def __init__(
        self,
        source: Source[Any],
        rollouts: Rollouts[Any, Batch, Details],
        export: Callable[[], WeightUpdate],
        *,
        total_steps: int,
        max_staleness: int,
        fixed: bool,
        partial: bool = False,
        is_compatible: Callable[[Path], bool] = lambda _: True,
        classes: Iterable[type] = (),
    ) -> None:
        assert not (fixed and partial)
        self._source, self._rollouts, self._export = source, rollouts, export
        self._total_steps, self._max_staleness, self._fixed = total_steps, max_staleness, fixed
        self._partial, self._is_compatible = partial, is_compatible
        self._classes = {kind.__name__: kind for kind in (_Drawn, Experience, *classes)}
        self._sampler = ThreadPoolExecutor(1, thread_name_prefix="sampler")
        self._pending: dict[int, Future[_Drawn[Batch, Details]]] = {}
        self._current: _Drawn[Batch, Details] | None = None
        self._newest: WeightUpdate | None = None
        self._loaded: WeightUpdate | None = None
        self._queue_lock, self._engine_lock = threading.Lock(), threading.Lock()
        self._progress: dict[int, tuple[int, int]] = {}
        self._closing = False
        self.position: StateDict = source.state_dict()
        """The state of the source after the last step that was begun."""

    @classmethod
    def from_async_mode(
        cls,
        mode: str,
        max_staleness: int,
        source: Source[Any],
        rollouts: Rollouts[Any, Batch, Details],
        export: Callable[[], WeightUpdate],
        **options: Any,
    ) -> Self | None:
        """Return the rollouts for a ``trainer.async_mode``; None for ``off``, where sampling and training alternate."""
        if mode == "off":
            return None
        fixed = mode == "one_step_off"
        staleness = 1 if fixed else max_staleness
        return cls(source, rollouts, export, max_staleness=staleness, fixed=fixed, **options)

    @property
    def can_evaluate(self) -> bool:
        return self._rollouts.can_evaluate

    def begin(self, step: int) -> None:
        self.load_weights(self._export())
        with self._exclusive_rollouts(self._newest):
            self._rollouts.begin(step)

    def collect(self, tasks: object, step: int, time: Timer, progress: Progress) -> Experience[Batch, Details]:
        """Return the batch of a step; `tasks` is ignored, because the sampler gets tasks from the source itself.

        Raises:
            Exception: the error that ended the sampling of this batch.
        """
        self._current = None
        for next_step in range(step, min(step + self._max_staleness, self._total_steps) + 1):
            if next_step not in self._pending:
                weights = self._newest if self._fixed else None
                self._pending[next_step] = self._sampler.submit(self._sample, next_step, weights)
        ready = sum(batch.done() and batch.exception() is None for batch in self._pending.values())
        with time("gen"):
            while not wait([self._pending[step]], POLL_SECONDS).done:
                progress(*self._progress.get(step, (0, 1)))
            drawn = self._pending[step].result()
        del self._pending[step]
        self._progress.pop(step, None)
        self._current, self.position = drawn, drawn.position
        assert self._newest is not None, "`begin` comes first"
        metrics = drawn.experience.metrics | {
            "training/staleness": float(self._newest.version - drawn.version),
            "perf/batches_ahead": float(ready),
        }
        return replace(drawn.experience, metrics=metrics)

    def _sample(self, step: int, weights: WeightUpdate | None) -> _Drawn[Batch, Details]:
        """Sample the batch of a step; runs in the sampler's thread."""

        def report(done: int, total: int) -> None:
            if self._closing:
                raise _SamplingCancelled
            self._progress[step] = (done, total)
            if self._partial:
                self._load(self._newest)

        with self._exclusive_rollouts(weights):
            assert self._loaded is not None, "`begin` comes first"
            version = self._loaded.version
            start, source_metrics = time.perf_counter(), self._source.metrics()
            experience = self._rollouts.collect(self._source.next(step), step, Timer(), report)
            seconds = {"timing_s/sampling": time.perf_counter() - start}
            experience = replace(experience, metrics=source_metrics | experience.metrics | seconds)
            return _Drawn(step, experience, version, self._source.state_dict())

    @contextmanager
    def _exclusive_rollouts(self, weights: WeightUpdate | None) -> Iterator[None]:
        """Give exclusive use of the rollouts, loaded with these weights or, for None, the newest."""
        # The second lock makes access first come, first served.
        with self._queue_lock:
            self._engine_lock.acquire()
        try:
            self._load(weights or self._newest)
            yield
        finally:
            self._engine_lock.release()

    def _load(self, weights: WeightUpdate | None) -> None:
        if weights is not None and weights is not self._loaded:
            self._rollouts.load_weights(weights)
            self._loaded = weights

    def load_weights(self, weights: WeightUpdate) -> None:
        self._newest = weights.copied()  # training continues to change the originals

    def evaluate(self, step: int, progress: Progress) -> EvaluationResult:
        with self._exclusive_rollouts(self._newest):
            return self._rollouts.evaluate(step, progress)

    def checkpoint_extras(self, *, in_step: bool) -> CheckpointExtras:
        if self._fixed:
            wait(self._pending.values())
        waiting = [self._current] if in_step and self._current else []
        for _, batch in sorted(self._pending.items()):
            if not batch.done() or batch.exception():
                break
            waiting.append(batch.result())
        extras = self._rollouts.checkpoint_extras(in_step=in_step)
        trees = []
        for drawn in waiting:
            try:
                trees.append(to_tree(drawn, self._classes))
            except TypeError as error:
                message = f"a run that resumes samples the batch of step {drawn.step} again: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
                break
        return CheckpointExtras(extras.state, {**extras.files, FILE: as_bytes({"batches": trees})})

    def load_checkpoint(self, checkpoint: Path) -> None:
        self._rollouts.load_checkpoint(checkpoint)
        file = checkpoint / FILE  # missing if the run did not sample asynchronously
        with reading(file, f"{ANOTHER_CHECKPOINT}, or delete this file and its entry"):
            waiting = [from_tree(tree, self._classes) for tree in load_state(file)["batches"]] if file.exists() else []
        if (checkpoint / OLD_FILE).exists():
            reason = "written by an earlier version, and not read; its batches are sampled again"
            warnings.warn(f"{checkpoint / OLD_FILE}: {reason}", RuntimeWarning, stacklevel=2)
        for drawn in waiting if waiting and self._is_compatible(checkpoint) else ():
            self._pending[drawn.step] = Future()
            self._pending[drawn.step].set_result(drawn)

    def load_position(self, state: StateDict) -> None:
        """Let the source continue after a checkpoint's batches; `state` is the source's state after the last step."""
        self.position = state
        self._source.load_state_dict(self._pending[max(self._pending)].result().position if self._pending else state)

    def record(self, step: int, experience: Experience[Batch, Details], time: Timer) -> None:
        self._rollouts.record(step, experience, time)

    def metrics(self, experience: Experience[Batch, Details], outputs: object, time: Timer) -> dict[str, float]:
        return self._rollouts.metrics(experience, outputs, time)

    def metrics_to_log(self) -> dict[str, float]:
        return self._rollouts.metrics_to_log()

    def logged(self) -> None:
        self._rollouts.logged()

    def checkpoint_saved(self, step: int) -> None:
        self._rollouts.checkpoint_saved(step)

    def state_dict(self) -> StateDict:
        return self._rollouts.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self._rollouts.load_state_dict(state)

    def close(self) -> None:
        """Stop the thread, which drops its batch when the next response ends."""
        self._closing = True
        self._sampler.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class SourceAhead:
    """Stands in for the source in the loop, since `SamplingAhead` calls it; its state is that of the last step."""

    ahead: SamplingAhead[Any, Any]

    def next(self, step: int) -> None:
        """Return None, because the sampler gets the tasks from the source."""

    def metrics(self) -> dict[str, float]:
        """Return no metrics, because the source's metrics come with the batch."""
        return {}

    def state_dict(self) -> StateDict:
        return self.ahead.position

    def load_state_dict(self, state: StateDict) -> None:
        self.ahead.load_position(state)
