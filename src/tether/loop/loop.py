"""The training loop, for language models and control policies alike.

One step: sample from the policy and score the samples; compute the outputs of the policy, the reference and the critic
for each of its decisions; turn rewards into advantages; update the critic and the policy; pass the new weights to the
rollouts. `Trainer.step` is exactly that; `Trainer.fit` decides when a run logs, evaluates, saves and stops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch.profiler import record_function

from tether.checkpoints import DiskFull, write_own
from tether.loop.alarms import Alarms, MismatchAlarm
from tether.loop.checkpoint import TRAINING, Persistence, check_saving, restore
from tether.loop.config import TrainerConfig
from tether.loop.engine import AnyLearner
from tether.loop.parts import (
    STOPS,
    BestEvaluation,
    Callbacks,
    CheckpointSaver,
    CriticWarmup,
    Rollbacks,
    RolloutCorrection,
    StepProfiler,
)
from tether.loop.protocol import RewardTransform, Rollouts, Source, StepRecorder
from tether.metrics.loggers import Loggers
from tether.metrics.timing import Timer
from tether.runtime.core_clock import CoreClock
from tether.runtime.disk import ANOTHER_CHECKPOINT, reading
from tether.runtime.global_rng import rng_state, set_rng_state
from tether.types import StateDict

OldLogProbs = Literal["recomputed", "sampler", "update"]
"""The origin of the old policy's log-probs: a separate forward pass; the sampler (bypass mode); or the update itself,
if it is the only one on the rollout and so starts from the old policy."""
OnCollapse = Literal["warn", "stop", "rollback"]
SelectRows = Callable[[Any, int], tuple[Any, dict[str, float]]]
"""Called with (batch with advantages, training step); returns the rows that the update learns from, and metrics."""


@dataclass(frozen=True)
class Schedule:
    """The steps at which a run saves, evaluates and logs; a frequency of 0 or below means never.

    A `save_freq` of -1 saves only after the last step.
    """

    total_steps: int
    save_freq: int = 0
    test_freq: int = -1
    val_before_train: bool = True
    log_freq: int = 1

    @classmethod
    def from_config(cls, trainer: TrainerConfig, total_steps: int) -> Schedule:
        """Return the schedule of a run with `total_steps` training steps, each of which is logged."""
        return cls(total_steps, trainer.save_freq, trainer.test_freq, trainer.val_before_train)

    def saves_at(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step; the last step always is, unless saving is off."""
        return self._is_due(step, self.save_freq) or (self.save_freq == -1 and step == self.total_steps)

    def evaluates_at(self, step: int) -> bool:
        """Return whether an evaluation is due after this step; the last step always is, unless evaluation is off."""
        return self._is_due(step, self.test_freq)

    def logs_at(self, step: int) -> bool:
        """Return whether the metrics of this step are logged; always for the last step and steps with an evaluation."""
        return self._is_due(step, self.log_freq) or self.evaluates_at(step)

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.total_steps)


def reason_to_stop(reached_target: bool, has_collapsed: bool, on_collapse: OnCollapse) -> str | None:
    """Return the setting that stops the run before its last step, or None if it continues.

    Args:
        reached_target: whether an evaluation has reached the target score.
        has_collapsed: whether an alarm has reported that the policy has collapsed.
        on_collapse: what the run does after such an alarm (``trainer.on_collapse``).
    """
    if reached_target:
        return "trainer.stop_at_score"
    return "trainer.on_collapse" if has_collapsed and on_collapse != "warn" else None


@dataclass(kw_only=True)
class Trainer:
    """Runs the training loop over the components of a run, which a `build` module makes from a configuration.

    A resumed run is bitwise equal to an uninterrupted one. Optional components may be None.
    """

    source: Source[Any]
    rollouts: Rollouts[Any, Any, Any]
    actor: AnyLearner
    critic: AnyLearner | None
    """The critic; None if there is none, or if it is part of the actor's model."""
    reference: Callable[[Any], Any] | None
    """Returns the outputs of the reference policy for a batch."""
    reward_transforms: Sequence[RewardTransform[Any]]
    """The transforms in the order in which they are applied."""
    estimate_advantages: Callable[[Any], dict[str, float]]
    """Adds advantages and returns to a batch, and returns metrics."""
    rollout_correction: RolloutCorrection | None = None
    select_rows: SelectRows | None = None
    """Selects the rows of the update; None selects all."""
    mismatch: MismatchAlarm | None = None
    old_log_probs: OldLogProbs = "recomputed"
    critic_warmup: CriticWarmup
    schedule: Schedule
    persistence: Persistence
    loggers: Loggers
    alarms: Alarms = field(default_factory=Alarms)
    best: BestEvaluation = field(default_factory=BestEvaluation)
    profiler: StepProfiler | None = None
    recorder: StepRecorder | None = None
    """Records samples or episodes of a step, for `tether view`."""
    saver: CheckpointSaver = field(default_factory=CheckpointSaver)
    on_collapse: OnCollapse = "warn"
    """What to do if an alarm reports that the policy has collapsed: continue, save and stop, or roll back."""
    rollbacks: Rollbacks | None = None
    """The rollbacks, if `on_collapse` is ``rollback``."""
    rollback_target: Path | None = None
    """The checkpoint from which the run is to be restarted after `fit` has returned."""
    stopped_by: str | None = None
    """The setting that stopped `fit` before the last step."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    step_number: int = 0
    """The number of finished training steps."""
    validation_due: bool = False
    """Whether the evaluation of the last step is still due, so that a resumed run begins with it."""
    unlogged: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step that have not been logged yet; a resumed run logs them first."""
    saved_step: int = 0
    """The step of the last checkpoint."""
    weights_change: bool = False
    """Whether the current step has started to change weights, so that nothing can be saved before it is done."""

    def step(self, tasks: Any) -> dict[str, float]:
        """Run one training step on tasks of the source and return its metrics."""
        number, time, cores = self.step_number + 1, Timer(self.loggers.phase, record_function), CoreClock()
        with time("step"):
            experience = self.rollouts.collect(tasks, number, time, self._show("gen"))
            batch, metrics, policy, updated = experience.batch, dict(experience.metrics), None, None
            if self.old_log_probs == "sampler":
                batch.old_log_probs = batch.rollout_log_probs
            elif self.old_log_probs == "recomputed":
                with time("old_log_prob"):
                    policy = self.actor.infer(batch)
                batch.update_from(policy)
                metrics |= self._compare_with_sampler(batch)
            if self.rollout_correction:
                metrics |= self.rollout_correction.apply(batch)
            if self.reference:
                with time("ref"):
                    batch.ref_log_probs = self.reference(batch).log_probs
            if self.critic:
                with time("values"):
                    batch.update_from(self.critic.infer(batch))
            with time("adv"):
                batch.token_level_rewards = batch.token_level_scores
                for transform in self.reward_transforms:
                    metrics |= transform.apply(batch)
                metrics |= self.estimate_advantages(batch)
                learned, selected = self.select_rows(batch, number) if self.select_rows else (batch, {})
                metrics |= selected
            self.rollouts.record(number, experience, time)
            self.weights_change = True
            if self.critic:
                with time("update_critic"):
                    metrics |= _prefixed("critic", self.critic.update(learned, number - 1).metrics)
            trains_policy = self.critic_warmup.observe(number, metrics.get("critic/vf_explained_var", -math.inf))
            if trains_policy or self.actor.critic_loss:
                with time("update_actor"):
                    updated = self.actor.update(learned, number - 1, critic_only=not trains_policy)
                metrics |= _prefixed("actor", updated.metrics)
                if self.old_log_probs == "update" and updated.outputs is not None:
                    batch.update_from(updated.outputs)
                    metrics |= self._compare_with_sampler(batch)
                with time("update_weights"):
                    self.rollouts.load_weights(self.actor.engine.export())
            if self.recorder and self.recorder.is_due:
                with time("record"):
                    trained = updated.outputs if updated and learned is batch else None
                    self.recorder.record(number, experience, policy, trained)
        self.step_number = number
        metrics |= self.rollouts.metrics(experience, policy, time)
        if (waited := cores.wait_fraction()) is not None:
            metrics["perf/cpu_wait_fraction"] = waited
        return metrics | {"training/global_step": float(number)}

    def _compare_with_sampler(self, batch: Any) -> dict[str, float]:
        return self.mismatch.measure(batch, self.loggers.warn) if self.mismatch else {}

    def fit(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Train to the last step, or until `interrupted`, an alarm or a target score stops the run and saves it."""
        is_new_run = self.step_number == 0
        if self.step_number < self.schedule.total_steps:
            self._check_saving()
        if is_new_run:
            self.rollouts.begin(self.step_number)
        if self.unlogged:
            self.log(self.unlogged)
            self.unlogged = {}
        if self.validation_due or (is_new_run and self.schedule.val_before_train and self.rollouts.can_evaluate):
            self.validation_due = False
            metrics = self.evaluate()
            if not is_new_run:
                self.alarms.check_validation(metrics, self.loggers.warn)
            self.loggers.log(self.step_number, metrics)
            self.callbacks.on_evaluation(self.step_number, metrics)
            self._track_best(metrics)
        if not is_new_run:  # after the evaluation, in the same order as in an uninterrupted run
            self.rollouts.begin(self.step_number)
        if self._decide_stop():
            return
        while self.step_number < self.schedule.total_steps:
            self.weights_change = False
            with self._saving_on_error(deepcopy(self.state()), rng_state()):
                self.unlogged = self.advance()
                warming_up = not self.critic_warmup.ended
                self.alarms.check_step(self.unlogged, warming_up=warming_up, warn=self.loggers.warn)
            with self._saving_on_error():
                done = self.step_number
                self.validation_due = self.rollouts.can_evaluate and self.schedule.evaluates_at(done)
                stopping = self._decide_stop() or interrupted()
                if self.validation_due and not stopping:
                    evaluation = self.evaluate()
                    self.alarms.check_validation(evaluation, self.loggers.warn)
                    self.unlogged |= evaluation
                    self.validation_due = False
                    self.callbacks.on_evaluation(done, evaluation)
                    self._track_best(evaluation)
                    stopping = self._decide_stop()
                metrics = self.log(self.unlogged) if self.schedule.logs_at(done) else self.unlogged
                self.unlogged = {}
                self.callbacks.on_step_end(done, metrics)
                saves = self.schedule.saves_at(done) or stopping
                self.collect_saved(wait=saves)
            # Save after logging: a run killed in between repeats the step and replaces its log line.
            if saves:
                self.save(stopping=stopping)
            if stopping:
                break
        else:
            if problem := self.critic_warmup.unfinished_problem():
                self.loggers.warn(problem)
        self.collect_saved(wait=True)

    def _check_saving(self) -> None:
        """Raise an error before the first step if a model cannot be saved; warn if the run saves no checkpoints."""
        try:
            check_saving(
                self.persistence.store.root, {role: learner.engine for role, learner in self._learners().items()}
            )
        except ValueError as error:
            if self.schedule.save_freq:
                raise
            self.loggers.warn(str(error))

    def _track_best(self, metrics: dict[str, float]) -> None:
        """Compare an evaluation with earlier ones, and keep the checkpoint of the best if it fits on the disk."""
        earlier = self.best.saved_score
        self.best.update(metrics)
        if self.best.is_new and self.best.persistence:
            self.loggers.phase("save_checkpoint")
            self.collect_saved(wait=True)
            try:
                self.write_checkpoint(self.state(), self.best.persistence)
            except DiskFull as error:
                self.best.saved_score = earlier
                self._skip_checkpoint(error, is_best=True)

    def _decide_stop(self) -> bool:
        """Decide whether the run stops now and, after a collapse, to which checkpoint it rolls back."""
        since = self.alarms.collapsed_since
        self.stopped_by = reason_to_stop(self.best.reached_target, since is not None, self.on_collapse)
        if since is not None and self.stopped_by != "trainer.stop_at_score":
            self.rollback_target = self.rollbacks.choose_target(since) if self.rollbacks else None
            # With a target, `collapsed_since` stays set: a run killed before the rollback does it when it resumes.
            if self.rollback_target is None:
                self.alarms.collapsed_since = None
            if self.stopped_by:
                self.loggers.warn(self.rollbacks.message(self.rollback_target, since) if self.rollbacks else STOPS)
        return self.stopped_by is not None

    def advance(self) -> dict[str, float]:
        """Run the next training step and return its metrics."""
        source_metrics, number = self.source.metrics(), self.step_number + 1
        with self.profiler.recording(number) if self.profiler else nullcontext():
            return self.step(self.source.next(number)) | source_metrics

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current policy, log samples and return its metrics."""
        time = Timer(self.loggers.phase, record_function)
        with time("testing"):
            result = self.rollouts.evaluate(self.step_number, self._show("testing"))
        if result.samples:
            self.loggers.log_samples(self.step_number, result.samples)
        return result.metrics | time.metrics()

    def log(self, metrics: dict[str, float]) -> dict[str, float]:
        """Log the metrics of the current step and return everything that was logged."""
        logged = metrics | self.rollouts.metrics_to_log()
        self.loggers.log(self.step_number, logged)
        self.rollouts.logged()  # after the log, which may fail and cause a checkpoint
        return logged

    def save(self, *, stopping: bool = False) -> None:
        """Save a checkpoint of the current step, and log how long training waited for it.

        If it does not fit on the disk, a run that continues keeps its earlier checkpoint. After the last step, and when
        a run stops without an earlier checkpoint, only the weights are saved in that case.

        Raises:
            DiskFull: the run stops early, or has no earlier checkpoint to continue with, or the weights do not fit
                either.
        """
        is_last = self.step_number == self.schedule.total_steps or self.best.reached_target
        time = Timer(self.loggers.phase, record_function)
        with time("save_checkpoint"):
            self.collect_saved(wait=True)
            rng = rng_state()
            try:
                self.saver.submit(self.step_number, self.begin_checkpoint(self.state(), copy=self.saver.background))
                if is_last or stopping:
                    self.saver.collect(self._checkpoint_complete, wait=True)
            except DiskFull as error:
                if is_last or (stopping and self.persistence.store.last_saved() is None):
                    self._save_weights(error)
                elif stopping and not self.rollback_target:
                    raise
                else:
                    self._skip_checkpoint(error)
            set_rng_state(rng)  # the libraries that write files may draw random numbers
            self.rollouts.checkpoint_saved(self.step_number)
        self.loggers.log(self.step_number, time.metrics())
        self.collect_saved(wait=False)

    def _save_weights(self, full: DiskFull) -> None:
        """Save only the models of the current step, and warn that the training state did not fit on the disk."""
        store = self.persistence.store
        store.protected = store.last_saved()  # the newest checkpoint from which a run can resume

        def start(folder: Path) -> Callable[[], None]:
            for role, learner in self._learners().items():
                learner.engine.save(folder / role)
            return lambda: None

        path = self.persistence.begin(self.step_number, start, None)()
        self.loggers.warn(
            f"{full.strerror} The weights alone fit: they are saved in {path}. No run can resume from them."
        )
        self._checkpoint_complete(self.step_number, path)

    def _skip_checkpoint(self, full: DiskFull, *, is_best: bool = False) -> None:
        """Warn that the run continues without this checkpoint, which did not fit on the disk.

        Raises:
            DiskFull: no earlier checkpoint exists from which a run could resume, and this is not the best evaluation's.
        """
        if not is_best and self.persistence.store.last_saved() is None:
            raise full
        self.loggers.warn(f"{full.strerror} The run continues without this checkpoint.")

    def collect_saved(self, *, wait: bool) -> None:
        """Notify callbacks of the last checkpoint if it is complete; with `wait`, wait for it first.

        Raises:
            DiskFull: it did not fit on the disk, and no earlier checkpoint exists.
        """
        try:
            self.saver.collect(self._checkpoint_complete, wait=wait)
        except DiskFull as error:
            self._skip_checkpoint(error)

    def _checkpoint_complete(self, step: int, path: Path) -> None:
        self.saved_step = step
        self.callbacks.on_checkpoint(step, path)

    def write_checkpoint(
        self, state: StateDict, persistence: Persistence | None = None, *, in_step: bool = False
    ) -> Path:
        """Write a checkpoint; the arguments are those of `begin_checkpoint`."""
        rng = rng_state()
        try:
            return self.begin_checkpoint(state, persistence, in_step=in_step)()
        finally:
            set_rng_state(rng)

    def begin_checkpoint(
        self, state: StateDict, persistence: Persistence | None = None, *, in_step: bool = False, copy: bool = False
    ) -> Callable[[], Path]:
        """Begin a checkpoint and return a function that completes it.

        Args:
            state: the result of `state`.
            persistence: replaces the persistence of the run.
            in_step: whether a step failed after `state` was called, before it changed a weight.
            copy: whether to copy everything that training changes, so that another thread can complete the
                checkpoint while training continues.
        """
        extras = self.rollouts.checkpoint_extras(in_step=in_step)

        def start(folder: Path) -> Callable[[], None]:
            completions = [
                learner.engine.saving(folder / role, folder / TRAINING / f"{role}.pt", copy=copy)
                for role, learner in self._learners().items()
            ]

            def write() -> None:
                for complete in completions:
                    complete()
                for name, content in extras.files.items():
                    write_own(folder / name, content)

            return write

        trainer = state | {"rollouts": state["rollouts"] | extras.state}
        return (persistence or self.persistence).begin(state["step"], start, trainer)

    def resume(self, checkpoint: Path) -> None:
        """Load all state of a checkpoint except the weights, which were loaded with the models."""
        engines = {role: learner.engine.load_state for role, learner in self._learners().items()}
        self.rollouts.load_checkpoint(checkpoint)
        with reading(checkpoint / TRAINING / "trainer.pt", ANOTHER_CHECKPOINT):
            self.load_state(restore(checkpoint, engines))

    def _learners(self) -> dict[str, AnyLearner]:
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    def _show(self, phase: str) -> Callable[[int, int], None]:
        return lambda done, total: self.loggers.phase(phase, done, total)

    @contextmanager
    def _saving_on_error(self, before: StateDict | None = None, rng: StateDict | None = None) -> Iterator[None]:
        """Save a checkpoint if the block raises: of the current state, or of the state `before` a step."""
        try:
            yield
        except BaseException as error:  # including SystemExit and KeyboardInterrupt from a callback
            with suppress(BaseException):  # a failed asynchronous checkpoint is saved again below
                self.collect_saved(wait=True)
            state = self.state() if before is None else before
            if state["step"] > self.saved_step and not (before and self.weights_change):
                stopping = f"stopping ({type(error).__name__})"
                try:
                    if rng is not None:
                        set_rng_state(rng)
                    path = self.write_checkpoint(state, in_step=before is not None)
                except Exception as failure:
                    if failure is error:  # a failed rank cannot save either; report its error only once
                        raise
                    reason = failure.strerror if isinstance(failure, OSError) else failure
                    self.loggers.warn(f"{stopping}, and no checkpoint could be saved: {reason}")
                    if isinstance(failure, DiskFull) and self.persistence.store.last_saved() is None:
                        with suppress(DiskFull):
                            self._save_weights(failure)
                else:
                    self.loggers.warn(f"{stopping}; {path} is saved, and the same command resumes from it")
            raise

    def state(self) -> StateDict:
        """Return all state except that of models, optimizers and environments."""
        return {
            "step": self.step_number,
            "validation_due": self.validation_due,
            "unlogged": dict(self.unlogged),
            "critic_warmup": self.critic_warmup.state_dict(),
            "alarms": self.alarms.state_dict(),
            "best": self.best.state_dict(),
            "mismatch": self.mismatch.state_dict() if self.mismatch else {},
            "source": self.source.state_dict(),
            "rollouts": self.rollouts.state_dict(),
            "reward_transforms": {
                type(transform).__name__: transform.state_dict() for transform in self.reward_transforms
            },
        }

    def load_state(self, state: StateDict) -> None:
        self.step_number = self.saved_step = int(state["step"])
        self.unlogged = {str(key): float(value) for key, value in state["unlogged"].items()}
        self.validation_due = state["validation_due"] and self.rollouts.can_evaluate
        self.critic_warmup.load_state_dict(state["critic_warmup"])
        self.alarms.load_state_dict(state["alarms"])
        self.best.load_state_dict(state["best"])
        if self.mismatch:
            self.mismatch.load_state_dict(state["mismatch"])
        self.source.load_state_dict(state["source"])
        self.rollouts.load_state_dict(state["rollouts"])
        for transform in self.reward_transforms:  # transforms added to the configuration since then have no saved state
            if type(transform).__name__ in state["reward_transforms"]:
                transform.load_state_dict(state["reward_transforms"][type(transform).__name__])


def _prefixed(role: str, metrics: dict[str, float]) -> dict[str, float]:
    return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}
