"""Small components of the training loop, most of which are enabled by configuration.

`Callbacks` are notified of each step, evaluation and checkpoint. `CheckpointSaver` completes checkpoints, either
immediately or in a thread while training continues (``trainer.async_save``). `CriticWarmup` delays training of the
policy until the critic explains the returns. `BestEvaluation` keeps the checkpoint of the best evaluation, and can end
the run.
`Rollbacks` decides whether a run whose policy has collapsed stops or continues from an earlier checkpoint.
`StepProfiler` traces selected steps, from every process of the run.

`RolloutCorrection` rejects samples that are too far from the policy, and weights the others by importance. This
requires recomputed old log-probs. In bypass mode the policy loss applies the same correction
(`tether.algorithms.POLICY_LOSSES["bypass_mode"]`), since only the sampler's log-probs are available before the update.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch.profiler import record_function

from tether.algorithms import (
    importance_metrics,
    importance_weights,
    masked_mean,
    masked_sum,
    rejection_mask,
    rejection_metrics,
    veto_mask,
)
from tether.batch import TrainBatch, filled, on_last_token
from tether.checkpoints import CheckpointStore, Rollback
from tether.loop.checkpoint import Persistence
from tether.metrics.loggers import evaluation_score
from tether.runtime.profiling import ProcessTrace
from tether.spelling import did_you_mean
from tether.types import StateDict

HOOKS: Mapping[str, tuple[str, ...]] = {
    "on_step_end": ("step", "metrics"),
    "on_evaluation": ("step", "metrics"),
    "on_checkpoint": ("step", "path"),
}
"""Callback methods and their arguments."""


class Callbacks:
    """Calls those methods of `HOOKS` that the objects define, in the order of the objects.

    An exception of a callback ends the run, after a checkpoint of the finished step.

    Args:
        objects: objects that each define at least one of the methods.

    Raises:
        ValueError: an object has none of the methods, or a method with an unknown name or wrong arguments.
    """

    def __init__(self, objects: Sequence[object] = ()) -> None:
        for index, callback in enumerate(objects):
            _check(callback, f"callbacks[{index}] ({type(callback).__name__})")
        self._objects = tuple(objects)

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Notify that a step is done, including its evaluation and log; `metrics` has all of its metrics."""
        self._call("on_step_end", step, metrics)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Notify that the policy was evaluated after a step; 0 is before the first step."""
        self._call("on_evaluation", step, metrics)

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Notify that a checkpoint was written."""
        self._call("on_checkpoint", step, path)

    def _call(self, hook: str, step: int, argument: Mapping[str, float] | Path) -> None:
        for callback in self._objects:
            if method := getattr(callback, hook, None):
                method(step, argument if isinstance(argument, Path) else dict(argument))


def _check(callback: object, name: str) -> None:
    hooks = [hook for hook in dir(callback) if hook.startswith("on_") and callable(getattr(callback, hook, None))]
    for hook in hooks:
        if hook not in HOOKS:
            raise ValueError(f"{name}: {hook} is never called.{did_you_mean(hook, HOOKS)} Hooks: {', '.join(HOOKS)}")
        try:
            signature = inspect.signature(getattr(callback, hook))
            signature.bind(*HOOKS[hook])
        except TypeError:
            raise ValueError(f"{name}: {hook}{signature} is called as {hook}({', '.join(HOOKS[hook])})") from None
    if not hooks:
        raise ValueError(f"{name}: has none of the methods {', '.join(HOOKS)}")


Complete = Callable[[], Path]
OnSaved = Callable[[int, Path], None]


class CheckpointSaver:
    """Writes one checkpoint at a time in a thread or immediately; `collect` raises the errors of writing."""

    def __init__(self, background: bool = False) -> None:
        self.background = background
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._step = 0
        self._pending: Future[Path] | None = None

    def submit(self, step: int, complete: Complete) -> None:
        """Complete the checkpoint of a step; earlier ones must have been collected."""
        assert self._pending is None
        self._step = step
        self._pending = self._thread.submit(complete) if self.background else _completed_future(complete())

    def collect(self, on_saved: OnSaved, *, wait: bool) -> None:
        """Call `on_saved` if the submitted checkpoint is complete; with `wait`, wait for it first."""
        if self._pending is None or not (wait or self._pending.done()):
            return
        pending, self._pending = self._pending, None
        on_saved(self._step, pending.result())

    def close(self) -> None:
        self._thread.shutdown()


def _completed_future(path: Path) -> Future[Path]:
    future: Future[Path] = Future()
    future.set_result(path)
    return future


@dataclass
class CriticWarmup:
    """Trains only the critic until a given step, and until it has once explained enough variance."""

    steps: int = 0
    """The step, counted from 1, before which only the critic learns, even if it already explains enough variance."""
    explained_variance: float | None = None
    """The share of the returns' variance that the critic must explain once; None: no requirement."""
    reached: bool = False
    """Whether the critic has explained that share once; the policy continues to learn if it gets worse later."""
    ended: bool = False
    """Whether the policy has learned in a step."""

    def observe(self, step: int, explained_variance: float) -> bool:
        """Record the variance that the critic explains in a step, and return whether the policy learns in this step.

        Args:
            step: the step, counted from 1.
            explained_variance: share of the variance of this step's returns that the values of its advantages explain;
                -inf if it is unknown.
        """
        self.reached |= self.explained_variance is None or explained_variance >= self.explained_variance
        is_over = step >= self.steps and self.reached
        self.ended |= is_over
        return is_over

    def unfinished_problem(self) -> str | None:
        """Return a message with the reason if the policy has not learned in any step of the run, else None."""
        if self.ended:
            return None
        if self.reached:
            return f"the policy did not learn in this run: it ends before trainer.critic_warmup={self.steps}; lower it"
        return (
            "the policy did not learn in this run: critic/vf_explained_var never reached "
            f"trainer.critic_warmup_until_explained_variance={self.explained_variance}; "
            "lower it, train longer or raise critic.optim.lr"
        )

    def state_dict(self) -> StateDict:
        """Return whether the threshold was reached, and whether the policy has learned."""
        return {"reached": self.reached, "ended": self.ended}

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned; a threshold that was reached stays reached if the setting changes."""
        self.reached, self.ended = state["reached"], state["ended"]


@dataclass
class BestEvaluation:
    """Tracks the highest `tether.metrics.loggers.evaluation_score` of a run."""

    persistence: Persistence | None = None
    """Saves the checkpoint of the best evaluation; None keeps none."""
    stop_at: float | None = None
    """The score at which the run stops; None: no such score."""
    score: float = -math.inf
    saved_score: float = -math.inf
    """The score of the saved best checkpoint, which is lower than `score` if a better one did not fit on the disk."""
    is_new: bool = False
    """Whether the last evaluation was better than that of the saved best checkpoint."""

    @property
    def reached_target(self) -> bool:
        """Whether an evaluation has reached the score at which the run stops."""
        return self.stop_at is not None and self.score >= self.stop_at

    def update(self, metrics: Mapping[str, float]) -> None:
        """Compare the score of an evaluation, if it has one, with the best earlier score."""
        score = evaluation_score(metrics)
        self.is_new = score > self.saved_score
        self.score, self.saved_score = max(self.score, score), max(self.saved_score, score)

    def state_dict(self) -> StateDict:
        return {"score": self.score, "saved_score": self.saved_score}

    def load_state_dict(self, state: StateDict) -> None:
        self.score = state["score"]
        self.saved_score = state.get("saved_score", self.score)  # older checkpoints do not have it


@dataclass(frozen=True)
class Rollbacks:
    """The rollbacks of a run, done and remaining; each returns to a checkpoint from before a collapse."""

    store: CheckpointStore
    max_rollbacks: int
    done: Sequence[Rollback]
    factor: float
    """The factor that each rollback applies to the policy's learning rate."""

    def choose_target(self, since: int) -> Path | None:
        """Return the newest checkpoint without signs of a collapse, and protect it from deletion.

        Return None if there is no such checkpoint or no rollback remains.

        Args:
            since: first step with signs of the collapse; its batch was sampled by the policy of the checkpoint before
                it. If it is not later than in the last collapse, the checkpoint of that rollback was already too late.
        """
        if len(self.done) >= self.max_rollbacks:
            return None
        again = bool(self.done) and since <= self.done[-1].collapsed
        checkpoint = self.store.newest_before(min(since - 1, self.done[-1].to) if again else since - 1)
        self.store.protected = checkpoint
        return checkpoint

    def message(self, target: Path | None, since: int) -> str:
        """Return the message to the user about the rollback to `target`, or about its absence."""
        if target is not None:
            return (
                f"trainer.on_collapse=rollback: signs of it began in step {since}; the run goes back to {target} with "
                f"{self.factor:g} times its learning rate (rollback {len(self.done) + 1} of {self.max_rollbacks})"
            )
        reason = f"trainer.max_rollbacks={self.max_rollbacks} are used up"
        if len(self.done) < self.max_rollbacks:
            reason = f"signs of it began in step {since}, and no earlier checkpoint is left to go back to"
        return f"trainer.on_collapse=rollback: {reason}, so the run is saved and stops"


STOPS = (
    "trainer.on_collapse=stop: the run is saved and stops. Resume from an earlier checkpoint "
    "(trainer.resume_mode=resume_path) with other settings; the same command continues without changes"
)


class Ranks(Protocol):
    """The processes of a run on several devices, as the loop uses them; `tether.distributed.Group` adds more."""

    @property
    def size(self) -> int: ...

    def call(self, component: str, method: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        """Call a method of a component on all ranks at once.

        Args:
            component: the component's key in the mapping that the factory returned.
            method: name of the method.
            arguments: positional arguments of each rank; None skips this rank, whose result is then None.

        Returns:
            The results, in the order of ranks.

        Raises:
            RankFailed: a rank failed or was lost.
        """
        ...


@dataclass(frozen=True)
class StepProfiler:
    """Writes traces to folders ``step_<N>``: ``loop.json.gz`` of this process, ``rank_<R>.json.gz`` of each rank."""

    steps: Collection[int]
    folder: Path
    ranks: Ranks | None = None
    """The ranks, each with a `ProcessTrace` named ``trace``; None if this is the only process."""

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Trace the block if the step is selected; a step that fails writes no trace."""
        if step not in self.steps:
            yield
            return
        folder, trace, file = self.folder / f"step_{step}", ProcessTrace(), None
        trace.start()
        try:
            if self.ranks:
                self.ranks.call("trace", "start", [()] * self.ranks.size)
            with record_function(f"step {step}"):
                yield
            if self.ranks:
                files = [folder / f"rank_{rank}.json.gz" for rank in range(self.ranks.size)]
                self.ranks.call("trace", "write", [(file,) for file in files])
            file = folder / "loop.json.gz"
        finally:
            trace.write(file)


@dataclass(frozen=True)
class RolloutCorrection:
    """Corrects for the mismatch between sampler and trainer with the formulas of
    `tether.algorithms.rollout_correction`."""

    importance: str | None = None
    """The level of the weights, ``token`` or ``sequence``; None computes no weights."""
    threshold: float = 2.0
    """The upper bound of a weight."""
    batch_normalize: bool = False
    """Whether to divide the weights by their mean over the batch."""
    threshold_lower: float | None = None
    """The lower bound of a weight; if it is set, weights outside of the bounds become 0."""
    rejection: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Bounds by mode, as returned by `parse_rejection`."""
    veto_threshold: float | None = None

    def apply(self, batch: TrainBatch) -> dict[str, float]:
        """Set `rollout_is_weights`, remove rejected tokens from `response_mask` and return metrics.

        The score of a row moves to its last accepted token. A row without an accepted token is ignored like one without
        a score.
        """
        # Later stages of the step ignore rejected tokens: advantages (GAE skips them) and the denominators of the
        # losses. Weights and their mean are computed over all sampled tokens, including rejected ones.
        old, sampler, sampled = filled(batch.old_log_probs), batch.rollout_log_probs, batch.response_mask
        if not sampled.any():
            return {}
        metrics: dict[str, float] = {}
        if self.importance is not None:
            batch.rollout_is_weights = importance_weights(
                old, sampler, sampled, level=self.importance, threshold=self.threshold,
                threshold_lower=self.threshold_lower, batch_normalize=self.batch_normalize,
            )  # fmt: skip
            metrics |= importance_metrics(
                old, sampler, sampled, level=self.importance, threshold=self.threshold,
                threshold_lower=self.threshold_lower,
            )  # fmt: skip
        accepted = sampled
        if self.rejection:
            accepted = rejection_mask(old, sampler, sampled, self.rejection)
            metrics |= rejection_metrics(old, sampler, sampled, self.rejection)
        if self.veto_threshold is not None:
            not_vetoed = veto_mask(old, sampler, sampled, self.veto_threshold)
            accepted = accepted & not_vetoed
            vetoed = ~not_vetoed.any(dim=-1)
            metrics["rollout_corr/rollout_token_veto_fraction"] = float(
                masked_mean(vetoed.float(), sampled.any(dim=-1))
            )
        scores = masked_sum(batch.token_level_scores, sampled, dim=-1)
        batch.token_level_scores = on_last_token(scores, accepted).to(batch.token_level_scores.dtype)
        batch.response_mask = accepted
        batch.leave_out(~accepted.any(dim=-1))
        return metrics
