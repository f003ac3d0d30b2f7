"""The training loop, for language models and control policies alike.

One step: let the policy act and score what it did; ask the policy, the reference and the critic about each of its
decisions; turn rewards into advantages; update the critic and the policy; hand the new weights to the rollouts.
`Trainer.step` is exactly that; `Trainer.fit` says when a run logs, tests, saves and stops.
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

from tether.checkpoints import write_own
from tether.metrics.loggers import Loggers
from tether.metrics.timing import Timer
from tether.runtime.disk import ANOTHER_CHECKPOINT, reading
from tether.runtime.global_rng import rng_state, set_rng_state
from tether.trainer.callbacks import Callbacks
from tether.trainer.checkpoint import TRAINING, Persistence, check_saving, restore
from tether.trainer.parts.alarms import Alarms
from tether.trainer.parts.best_test import BestTest
from tether.trainer.parts.critic_warmup import CriticWarmup
from tether.trainer.parts.mismatch import MismatchAlarm
from tether.trainer.parts.profiler import StepProfiler
from tether.trainer.parts.rollback import STOPS, Rollbacks
from tether.trainer.parts.rollout_correction import RolloutCorrection
from tether.trainer.protocol import RewardTransform, Rollouts, Source
from tether.trainer.saver import Saver
from tether.training import AnyLearner
from tether.types import StateDict

OldLogProbs = Literal["recomputed", "sampler", "update"]
"""Where the log-probs under the old policy come from: a forward pass of their own; the sampler's, as they are (bypass
mode); or the only update that a rollout is used for, which begins with the old policy."""
OnCollapse = Literal["warn", "stop", "rollback"]
SelectRows = Callable[[Any, int], tuple[Any, dict[str, float]]]
"""(batch with advantages, training step) -> the rows that the update learns from, and metrics."""


@dataclass(frozen=True)
class Schedule:
    """When what happens, in training steps; a frequency of 0 or below means never.

    A `save_freq` of -1 saves after the last step alone.
    """

    total_steps: int
    save_freq: int = 0
    test_freq: int = -1
    val_before_train: bool = True
    log_freq: int = 1

    def saves_at(self, step: int) -> bool:
        """Is a checkpoint due after this step; always after the last, if any are saved."""
        return self._is_due(step, self.save_freq) or (self.save_freq == -1 and step == self.total_steps)

    def tests_at(self, step: int) -> bool:
        """Is a validation due after this step; always after the last, if there are any."""
        return self._is_due(step, self.test_freq)

    def logs_at(self, step: int) -> bool:
        """Are the metrics of this step logged; always those of the last, and of one that is tested."""
        return self._is_due(step, self.log_freq) or self.tests_at(step)

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.total_steps)


@dataclass(kw_only=True)
class Trainer:
    """All parts of a run; `tether.assembly` makes one from a configuration. A resumed run is bitwise the uninterrupted
    one. Everything optional is an object that may be None.
    """

    source: Source[Any]
    rollouts: Rollouts[Any, Any, Any]
    actor: AnyLearner
    critic: AnyLearner | None
    """None where there is none, or where it is part of the actor's model."""
    reference: Callable[[Any], Any] | None
    """Outputs of the reference policy for a batch."""
    reward_transforms: Sequence[RewardTransform[Any]]
    """Applied in this order."""
    estimate_advantages: Callable[[Any], dict[str, float]]
    """Fills in advantages and returns, and gives metrics."""
    rollout_correction: RolloutCorrection | None = None
    select_rows: SelectRows | None = None
    """None: every row is learned from."""
    mismatch: MismatchAlarm | None = None
    old_log_probs: OldLogProbs = "recomputed"
    critic_warmup: CriticWarmup
    schedule: Schedule
    persistence: Persistence
    loggers: Loggers
    alarms: Alarms = field(default_factory=Alarms)
    best: BestTest = field(default_factory=BestTest)
    profiler: StepProfiler | None = None
    saver: Saver = field(default_factory=Saver)
    on_collapse: OnCollapse = "warn"
    """Where an alarm says that the policy has collapsed: go on, save and stop, or do so to be started again earlier."""
    rollbacks: Rollbacks | None = None
    """With ``rollback``."""
    goes_back_to: Path | None = None
    """The checkpoint from which the run that `fit` has ended is to be started again."""
    stopped_by: str | None = None
    """The setting that ended `fit` before the last step."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    step_number: int = 0
    """Training steps done."""
    validation_due: bool = False
    """The validation of the last step has not been done: the resumed run begins with it."""
    unlogged: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step that no log has: the resumed run begins with them."""
    saved_step: int = 0
    """Step of the last checkpoint."""
    weights_change: bool = False
    """The step in progress has begun to change weights: nothing can be saved before it is done."""

    def step(self, tasks: Any) -> dict[str, float]:
        """Do one training step with what the source dealt; returns its metrics."""
        number, time = self.step_number + 1, Timer(self.loggers.phase, record_function)
        with time("step"):
            experience = self.rollouts.collect(tasks, number, time, self._show("gen"))
            batch, metrics, policy = experience.batch, dict(experience.metrics), None
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
            trains_policy = self.critic_warmup.is_over(number, metrics.get("critic/vf_explained_var", -math.inf))
            if trains_policy or self.actor.critic_loss:
                with time("update_actor"):
                    updated = self.actor.update(learned, number - 1, critic_only=not trains_policy)
                metrics |= _prefixed("actor", updated.metrics)
                if self.old_log_probs == "update" and updated.outputs is not None:
                    batch.update_from(updated.outputs)
                    metrics |= self._compare_with_sampler(batch)
                with time("update_weights"):
                    self.rollouts.load_weights(self.actor.engine.export())
        self.step_number = number
        return metrics | self.rollouts.metrics(experience, policy, time) | {"training/global_step": float(number)}

    def _compare_with_sampler(self, batch: Any) -> dict[str, float]:
        return self.mismatch.measure(batch, self.loggers.warn) if self.mismatch else {}

    def fit(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Train to the last step, or until `interrupted` or an alarm says so after one; then a checkpoint is saved."""
        starts = self.step_number == 0
        if self.step_number < self.schedule.total_steps:
            self._check_saving()
        if starts:
            self.rollouts.begin(self.step_number)
        if self.unlogged:
            self.log(self.unlogged)
            self.unlogged = {}
        if self.validation_due or (starts and self.schedule.val_before_train and self.rollouts.can_evaluate):
            self.validation_due = False
            metrics = self.evaluate()
            if not starts:
                self.alarms.check_validation(metrics, self.loggers.warn)
            self.loggers.log(self.step_number, metrics)
            self.callbacks.on_evaluation(self.step_number, metrics)
            self._judge(metrics)
        if not starts:  # after the validation, as in a run that was not interrupted before it
            self.rollouts.begin(self.step_number)
        if self._has_to_stop():
            return
        while self.step_number < self.schedule.total_steps:
            self.weights_change = False
            with self._saving_first(deepcopy(self.state()), rng_state()):
                self.unlogged = self.advance()
                warming_up = not self.critic_warmup.ended
                self.alarms.check_step(self.unlogged, warming_up=warming_up, warn=self.loggers.warn)
            with self._saving_first():
                done = self.step_number
                self.validation_due = self.rollouts.can_evaluate and self.schedule.tests_at(done)
                stopping = self._has_to_stop() or interrupted()
                if self.validation_due and not stopping:
                    tested = self.evaluate()
                    self.alarms.check_validation(tested, self.loggers.warn)
                    self.unlogged |= tested
                    self.validation_due = False
                    self.callbacks.on_evaluation(done, tested)
                    self._judge(tested)
                    stopping = self._has_to_stop()
                measured = self.log(self.unlogged) if self.schedule.logs_at(done) else self.unlogged
                self.unlogged = {}
                self.callbacks.on_step_end(done, measured)
                saves = self.schedule.saves_at(done) or stopping
                self.collect_saved(wait=saves)
            # After the log: a run killed in between does the step again, and its line is replaced, never missing.
            if saves:
                self.save()
            if stopping:
                break
        else:
            if complaint := self.critic_warmup.never_over():
                self.loggers.warn(complaint)
        self.collect_saved(wait=True)

    def _check_saving(self) -> None:
        """What cannot be saved is refused before the first step; a run that is not to be saved is only warned."""
        try:
            check_saving(
                self.persistence.store.root, {role: learner.engine for role, learner in self._learners().items()}
            )
        except ValueError as error:
            if self.schedule.save_freq:
                raise
            self.loggers.warn(str(error))

    def _judge(self, tested: dict[str, float]) -> None:
        """Compare a test with those before, and keep the checkpoint of the best."""
        self.best.take(tested)
        if self.best.is_new and self.best.persistence:
            self.loggers.phase("save_checkpoint")
            self.collect_saved(wait=True)
            self.write_checkpoint(self.state(), self.best.persistence)

    def _has_to_stop(self) -> bool:
        """Whether a test was good enough, or an alarm has spoken of a collapse since the last call and the run is to
        stop then.
        """
        if self.best.is_enough:
            self.stopped_by = "trainer.stop_at_score"
            return True
        since = self.alarms.collapsed_since
        if since is None:
            return False
        self.goes_back_to = self.rollbacks.target(since) if self.rollbacks else None
        if self.goes_back_to is None:  # else a run that is killed before it went back does so when it resumes
            self.alarms.collapsed_since = None
        if self.on_collapse == "warn":
            return False
        self.stopped_by = "trainer.on_collapse"
        self.loggers.warn(self.rollbacks.words(self.goes_back_to, since) if self.rollbacks else STOPS)
        return True

    def advance(self) -> dict[str, float]:
        """Do the next training step; returns its metrics."""
        source, number = self.source.metrics(), self.step_number + 1
        with self.profiler.recording(number) if self.profiler else nullcontext():
            return self.step(self.source.next(number)) | source

    def evaluate(self) -> dict[str, float]:
        """Validate the current policy; returns its metrics and logs samples."""
        time = Timer(self.loggers.phase, record_function)
        with time("testing"):
            result = self.rollouts.evaluate(self.step_number, self._show("testing"))
        if result.samples:
            self.loggers.log_samples(self.step_number, result.samples)
        return result.metrics | time.metrics()

    def log(self, metrics: dict[str, float]) -> dict[str, float]:
        """Log the metrics of the current step; returns all that was logged."""
        logged = metrics | self.rollouts.metrics_to_log()
        self.loggers.log(self.step_number, logged)
        self.rollouts.logged()  # after the log, which may fail: a checkpoint is saved then
        return logged

    def save(self) -> None:
        """Save a checkpoint of the current step; how long training waited for it is logged under the step, too."""
        time = Timer(self.loggers.phase, record_function)
        with time("save_checkpoint"):
            self.collect_saved(wait=True)
            rng = rng_state()
            self.saver.take(self.step_number, self.begin_checkpoint(self.state(), copy=self.saver.later))
            set_rng_state(rng)  # whatever the libraries that write draw
            self.rollouts.saved(self.step_number)
        self.loggers.log(self.step_number, time.metrics())
        self.collect_saved(wait=False)

    def collect_saved(self, *, wait: bool) -> None:
        """Tell of the last checkpoint, once it is complete; with `wait` it is then."""
        self.saver.collect(self._saved, wait=wait)

    def _saved(self, step: int, path: Path) -> None:
        self.saved_step = step
        self.callbacks.on_checkpoint(step, path)

    def write_checkpoint(
        self, state: StateDict, persistence: Persistence | None = None, *, in_step: bool = False
    ) -> Path:
        """Write a checkpoint; for the arguments see `begin_checkpoint`."""
        rng = rng_state()
        path = self.begin_checkpoint(state, persistence, in_step=in_step)()
        set_rng_state(rng)
        return path

    def begin_checkpoint(
        self,
        state: StateDict,
        persistence: Persistence | None = None,
        *,
        in_step: bool = False,
        copy: bool = False,
    ) -> Callable[[], Path]:
        """Begin a checkpoint; what is returned completes it.

        Args:
            state: what `state` gave.
            persistence: another one than that of the run.
            in_step: a step was begun after that, and failed before it changed a weight.
            copy: of all that training goes on to change, so that it may be completed meanwhile, in another thread.
        """
        frozen = self.rollouts.freeze(in_step=in_step)

        def start(folder: Path) -> Callable[[], None]:
            rest = [
                learner.engine.saving(folder / role, folder / TRAINING / f"{role}.pt", copy=copy)
                for role, learner in self._learners().items()
            ]

            def write() -> None:
                for complete in rest:
                    complete()
                for name, content in frozen.files.items():
                    write_own(folder / name, content)

            return write

        trainer = state | {"rollouts": state["rollouts"] | frozen.state}
        return (persistence or self.persistence).begin(state["step"], start, trainer)

    def resume(self, checkpoint: Path) -> None:
        """Take over all state of a checkpoint; the weights came with the models."""
        engines = {role: learner.engine.load_state for role, learner in self._learners().items()}
        self.rollouts.restore(checkpoint)
        with reading(checkpoint / TRAINING / "trainer.pt", ANOTHER_CHECKPOINT):
            self.load_state(restore(checkpoint, engines))

    def _learners(self) -> dict[str, AnyLearner]:
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    def _show(self, phase: str) -> Callable[[int, int], None]:
        return lambda done, total: self.loggers.phase(phase, done, total)

    @contextmanager
    def _saving_first(self, before: StateDict | None = None, rng: StateDict | None = None) -> Iterator[None]:
        """Whatever ends the run inside, a checkpoint is saved first: of now, or of how all was `before` a step."""
        try:
            yield
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a callback, too
            with suppress(BaseException):  # it is saved again below
                self.collect_saved(wait=True)
            state = self.state() if before is None else before
            if state["step"] > self.saved_step and not (before and self.weights_change):
                stopping = f"stopping ({type(error).__name__})"
                try:
                    if rng is not None:
                        set_rng_state(rng)
                    path = self.write_checkpoint(state, in_step=before is not None)
                except Exception as failure:
                    if failure is error:  # of a rank, which saves nothing any more: it is said once
                        raise
                    why = failure.strerror if isinstance(failure, OSError) else failure
                    self.loggers.warn(f"{stopping}, and no checkpoint could be saved: {why}")
                else:
                    self.loggers.warn(f"{stopping}; {path} is saved, and the same command resumes from it")
            raise

    def state(self) -> StateDict:
        """All state that no model, optimizer or environment holds."""
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
            "reward_transforms": {type(part).__name__: part.state_dict() for part in self.reward_transforms},
        }

    def load_state(self, state: StateDict) -> None:
        """Take over what `state` gave."""
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
        for part in self.reward_transforms:  # one that is new in the configuration begins without a state
            if type(part).__name__ in state["reward_transforms"]:
                part.load_state_dict(state["reward_transforms"][type(part).__name__])


def _prefixed(role: str, metrics: dict[str, float]) -> dict[str, float]:
    return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}
