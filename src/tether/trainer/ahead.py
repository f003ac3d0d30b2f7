"""Asynchronous training: the next batches are sampled while the policy learns.

One thread samples, one batch after the other, with weights of its own::

    sampler    batch 1 │ batch 2 (0 updates) │ batch 3 (1 update) │ batch 4 (2 updates) │
    trainer            │ step 1              │ step 2             │ step 3              │

At the beginning of step k the batches up to k + `max_staleness` are asked for, so that a batch is at most
`max_staleness` updates older than the policy that learns from it. A batch is drawn with the weights of when it was
asked for (`fixed`, which makes the whole run a function of its inputs), or with the newest of when the sampler gets
to it, which then depends on how fast either side is.

With `partial` the sampler takes newer weights within a batch, too, each time that a response of it ends: the others go
on with them. A batch counts as old as the weights that it was begun with, so that the bound is one for every token.

A checkpoint holds the batches that wait for their step. With `fixed` it waits for the one in progress, too, so that a
resumed run is bitwise the uninterrupted one; without, that batch is sampled again, with the weights of the checkpoint.
All of them are sampled again where the settings that drew them are not those of the resumed run.
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
from typing import Any, Generic

from tether.batch import WeightUpdate
from tether.checkpoints import as_bytes, from_tree, load_state, to_tree
from tether.metrics.timing import Timer
from tether.runtime.disk import ANOTHER_CHECKPOINT, reading
from tether.trainer.protocol import Batch, Details, EvaluationResult, Experience, Frozen, Progress, Rollouts, Source
from tether.types import StateDict

FILE = "ahead.pt"
"""In a checkpoint: the batches that wait for their step."""
OLD_FILE = "ahead.pkl"
"""The same as a pickle, which earlier versions wrote; it is not read, since reading one can run code."""
_LOOKS = 0.1  # seconds between two looks at how far a batch is that a step waits for


class _Closing(Exception):
    """The run is over: what is being sampled has no use any more."""


@dataclass(frozen=True)
class _Drawn(Generic[Batch, Details]):
    """A batch that waits for its step."""

    step: int
    experience: Experience[Batch, Details]
    version: int
    """Of the weights that it was begun with."""
    position: StateDict
    """State of the source after it."""


class SamplingAhead(Generic[Batch, Details]):
    """Rollouts that sample ahead of the loop; see `tether.trainer.protocol.Rollouts`.

    Args:
        source: of the tasks of each step; the sampler asks it, in the order of steps.
        rollouts: that sample, score and evaluate, with weights that training does not change in place.
        export: the policy's present weights.
        total_steps: of the run; nothing is sampled for a later step.
        max_staleness: most updates between the weights that draw a batch and those that learn from it, at least 1.
        fixed: see the module.
        partial: see the module; not with `fixed`.
        are_ours: whether the batches that a checkpoint holds were drawn with the settings of this run.
        classes: of the objects in a batch and its details; see `tether.checkpoints.to_tree`.
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
        are_ours: Callable[[Path], bool] = lambda _: True,
        classes: Iterable[type] = (),
    ) -> None:
        assert not (fixed and partial)
        self._source, self._rollouts, self._export = source, rollouts, export
        self._total_steps, self._max_staleness, self._fixed = total_steps, max_staleness, fixed
        self._partial, self._are_ours = partial, are_ours
        self._classes = {kind.__name__: kind for kind in (_Drawn, Experience, *classes)}
        self._sampler = ThreadPoolExecutor(1, thread_name_prefix="sampler")
        self._asked: dict[int, Future[_Drawn[Batch, Details]]] = {}
        self._taken: _Drawn[Batch, Details] | None = None
        self._newest: WeightUpdate | None = None
        self._loaded: WeightUpdate | None = None
        self._turn, self._engine = threading.Lock(), threading.Lock()
        self._progress: dict[int, tuple[int, int]] = {}
        self._closing = False
        self.position: StateDict = source.state_dict()
        """State of the source after the last step that was begun."""

    @property
    def can_evaluate(self) -> bool:
        """See `Rollouts`."""
        return self._rollouts.can_evaluate

    def begin(self, step: int) -> None:
        """See `Rollouts`."""
        self.load_weights(self._export())
        with self._alone(self._newest):
            self._rollouts.begin(step)

    def collect(self, tasks: object, step: int, time: Timer, progress: Progress) -> Experience[Batch, Details]:
        """See `Rollouts`; the sampler has asked for its `tasks` itself.

        Raises:
            Exception: whatever ended the sampling of this batch.
        """
        self._taken = None
        for one in range(step, min(step + self._max_staleness, self._total_steps) + 1):
            if one not in self._asked:
                self._asked[one] = self._sampler.submit(self._draw, one, self._newest if self._fixed else None)
        waiting = sum(asked.done() and asked.exception() is None for asked in self._asked.values())
        with time("gen"):
            while not wait([self._asked[step]], _LOOKS).done:
                progress(*self._progress.get(step, (0, 1)))
            drawn = self._asked[step].result()
        del self._asked[step]
        self._progress.pop(step, None)
        self._taken, self.position = drawn, drawn.position
        assert self._newest is not None, "`begin` comes first"
        metrics = drawn.experience.metrics | {
            "training/staleness": float(self._newest.version - drawn.version),
            "perf/batches_ahead": float(waiting),
        }
        return replace(drawn.experience, metrics=metrics)

    def _draw(self, step: int, weights: WeightUpdate | None) -> _Drawn[Batch, Details]:
        """Runs in the thread of the sampler."""

        def tell(done: int, total: int) -> None:
            if self._closing:
                raise _Closing
            self._progress[step] = (done, total)
            if self._partial:
                self._load(self._newest)

        with self._alone(weights):
            assert self._loaded is not None, "`begin` comes first"
            oldest = self._loaded.version
            begun, source = time.perf_counter(), self._source.metrics()
            experience = self._rollouts.collect(self._source.next(step), step, Timer(), tell)
            seconds = {"timing_s/sampling": time.perf_counter() - begun}
            whole = replace(experience, metrics=source | experience.metrics | seconds)
            return _Drawn(step, whole, oldest, self._source.state_dict())

    @contextmanager
    def _alone(self, weights: WeightUpdate | None) -> Iterator[None]:
        """While nobody else uses the rollouts, with these weights; None: the newest. First come, first served."""
        with self._turn:
            self._engine.acquire()
        try:
            self._load(weights or self._newest)
            yield
        finally:
            self._engine.release()

    def _load(self, weights: WeightUpdate | None) -> None:
        if weights is not None and weights is not self._loaded:
            self._rollouts.load_weights(weights)
            self._loaded = weights

    def load_weights(self, weights: WeightUpdate) -> None:
        """See `Rollouts`; they are copied, as training goes on to change them."""
        self._newest = weights.copied()

    def evaluate(self, step: int, progress: Progress) -> EvaluationResult:
        """See `Rollouts`; the sampler pauses after the batch in progress."""
        with self._alone(self._newest):
            return self._rollouts.evaluate(step, progress)

    def freeze(self, *, in_step: bool) -> Frozen:
        """See `Rollouts`."""
        if self._fixed:
            wait(self._asked.values())
        kept = [self._taken] if in_step and self._taken else []
        for _, asked in sorted(self._asked.items()):
            if not asked.done() or asked.exception():
                break
            kept.append(asked.result())
        frozen = self._rollouts.freeze(in_step=in_step)
        trees = []
        for drawn in kept:
            try:
                trees.append(to_tree(drawn, self._classes))
            except TypeError as error:
                message = f"what was sampled for step {drawn.step} is sampled again by a run that resumes: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
                break
        return Frozen(frozen.state, {**frozen.files, FILE: as_bytes({"batches": trees})})

    def restore(self, checkpoint: Path) -> None:
        """See `Rollouts`; a checkpoint of a run that did not sample ahead holds no batches."""
        self._rollouts.restore(checkpoint)
        file = checkpoint / FILE
        with reading(file, f"{ANOTHER_CHECKPOINT}, or delete this file and its entry"):
            waiting = [from_tree(tree, self._classes) for tree in load_state(file)["batches"]] if file.exists() else []
        if (checkpoint / OLD_FILE).exists():
            what = "written by an earlier version, and not read; its batches are sampled again"
            warnings.warn(f"{checkpoint / OLD_FILE}: {what}", RuntimeWarning, stacklevel=2)
        for drawn in waiting if waiting and self._are_ours(checkpoint) else ():
            self._asked[drawn.step] = Future()
            self._asked[drawn.step].set_result(drawn)

    def take_position(self, state: StateDict) -> None:
        """The source goes on after the batches that a checkpoint holds; `state`: after its last step."""
        self.position = state
        self._source.load_state_dict(self._asked[max(self._asked)].result().position if self._asked else state)

    def record(self, step: int, experience: Experience[Batch, Details], time: Timer) -> None:
        """See `Rollouts`."""
        self._rollouts.record(step, experience, time)

    def metrics(self, experience: Experience[Batch, Details], outputs: object, time: Timer) -> dict[str, float]:
        """See `Rollouts`."""
        return self._rollouts.metrics(experience, outputs, time)

    def metrics_to_log(self) -> dict[str, float]:
        """See `Rollouts`."""
        return self._rollouts.metrics_to_log()

    def logged(self) -> None:
        """See `Rollouts`."""
        self._rollouts.logged()

    def saved(self, step: int) -> None:
        """See `Rollouts`."""
        self._rollouts.saved(step)

    def state_dict(self) -> StateDict:
        """See `Rollouts`."""
        return self._rollouts.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """See `Rollouts`."""
        self._rollouts.load_state_dict(state)

    def close(self) -> None:
        """End the thread; what it samples is dropped at the next response that ends."""
        self._closing = True
        self._sampler.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class SourceAhead:
    """Stands in the loop for the source that `SamplingAhead` asks itself; its state is that after the last step."""

    ahead: SamplingAhead[Any, Any]

    def next(self, step: int) -> None:
        """The sampler knows the tasks."""

    def metrics(self) -> dict[str, float]:
        """They come with the batch."""
        return {}

    def state_dict(self) -> StateDict:
        """See `Source`."""
        return self.ahead.position

    def load_state_dict(self, state: StateDict) -> None:
        """See `Source`."""
        self.ahead.take_position(state)
