"""The loop that language models and control policies are trained in: when a run logs, tests, saves and stops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.metrics.loggers import Loggers
from tether.metrics.timing import Timer
from tether.runtime.global_rng import rng_state, set_rng_state
from tether.trainer.callbacks import Callbacks
from tether.trainer.checkpoint import Persistence
from tether.trainer.parts.alarms import Alarms
from tether.trainer.parts.critic_warmup import CriticWarmup


@dataclass(frozen=True)
class Schedule:
    """When what happens, in training steps; a frequency of 0 or below means never."""

    total_steps: int
    save_freq: int = -1
    test_freq: int = -1
    val_before_train: bool = True
    log_freq: int = 1

    def saves_at(self, step: int) -> bool:
        """Is a checkpoint due after this step; always after the last, if any are saved."""
        return self._is_due(step, self.save_freq)

    def tests_at(self, step: int) -> bool:
        """Is a validation due after this step; always after the last, if there are any."""
        return self._is_due(step, self.test_freq)

    def logs_at(self, step: int) -> bool:
        """Are the metrics of this step logged; always those of the last, and of one that is tested."""
        return self._is_due(step, self.log_freq) or self.tests_at(step)

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.total_steps)


@dataclass(kw_only=True)
class TrainingLoop(ABC):
    """Training, validation and saving, step by step; a resumed run is bitwise the uninterrupted one."""

    critic_warmup: CriticWarmup
    schedule: Schedule
    persistence: Persistence
    loggers: Loggers
    alarms: Alarms = field(default_factory=Alarms)
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

    def fit(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Train up to the last step, or until `interrupted` says so after a step; then a checkpoint is saved."""
        starts = self.step_number == 0
        if starts:
            self.begin()
        if self.unlogged:
            self.log(self.unlogged)
            self.unlogged = {}
        if self.validation_due or (starts and self.schedule.val_before_train and self.can_evaluate):
            self.validation_due = False
            metrics = self.evaluate()
            if not starts:
                self.alarms.check_validation(metrics, self.loggers.warn)
            self.loggers.log(self.step_number, metrics)
            self.callbacks.on_evaluation(self.step_number, metrics)
        if not starts:  # after the validation, as in a run that was not interrupted before it
            self.begin()
        while self.step_number < self.schedule.total_steps:
            self.weights_change = False
            with self._saving_first(deepcopy(self.state()), rng_state()):
                self.unlogged = self.advance()
                warming_up = not self.critic_warmup.ended
                self.alarms.check_step(self.unlogged, warming_up=warming_up, warn=self.loggers.warn)
            done, stopping = self.step_number, interrupted()
            self.validation_due = self.can_evaluate and self.schedule.tests_at(done)
            with self._saving_first():
                if self.validation_due and not stopping:
                    tested = self.evaluate()
                    self.alarms.check_validation(tested, self.loggers.warn)
                    self.unlogged |= tested
                    self.validation_due = False
                    self.callbacks.on_evaluation(done, tested)
                measured = self.log(self.unlogged) if self.schedule.logs_at(done) else self.unlogged
                self.unlogged = {}
                self.callbacks.on_step_end(done, measured)
            # After the log: a run killed in between does the step again, and its line is replaced, never missing.
            if self.schedule.saves_at(done) or stopping:
                self.save()
            if stopping:
                return
        if complaint := self.critic_warmup.never_over():
            self.loggers.warn(complaint)

    def begin(self) -> None:  # noqa: B027 (a run may have nothing to prepare)
        """Called once before the first step of a run that starts or resumes."""

    @property
    @abstractmethod
    def can_evaluate(self) -> bool:
        """There is something to test the policy on."""

    @abstractmethod
    def advance(self) -> dict[str, float]:
        """Do the next training step; returns its metrics."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Test the current policy; returns its metrics."""

    @abstractmethod
    def write_checkpoint(self, state: dict[str, Any], *, in_step: bool = False) -> Path:
        """Write a checkpoint.

        Args:
            state: what `state` gave.
            in_step: a step was begun after that, and failed before it changed a weight.
        """

    def log(self, metrics: dict[str, float]) -> dict[str, float]:
        """Log the metrics of the current step; returns all that was logged."""
        self.loggers.log(self.step_number, metrics)
        return metrics

    def save(self) -> None:
        """Write a checkpoint of the current step; how long that took is logged under the step, too."""
        time = Timer(on_phase=self.loggers.phase)
        with time("save_checkpoint"):
            path = self.write_checkpoint(self.state())
        self.saved_step = self.step_number
        self.loggers.log(self.step_number, time.metrics())
        self.callbacks.on_checkpoint(self.step_number, path)

    @contextmanager
    def _saving_first(self, before: dict[str, Any] | None = None, rng: dict[str, Any] | None = None) -> Iterator[None]:
        """Whatever ends the run inside, a checkpoint is saved first: of now, or of how all was `before` a step."""
        try:
            yield
        except Exception as error:
            state = self.state() if before is None else before
            if state["step"] > self.saved_step and not (before and self.weights_change):
                stopping = f"stopping ({type(error).__name__})"
                try:
                    if rng is not None:
                        set_rng_state(rng)
                    path = self.write_checkpoint(state, in_step=before is not None)
                except Exception as failure:  # noqa: BLE001  it must not hide the failure that ends the run
                    why = failure.strerror if isinstance(failure, OSError) else failure
                    self.loggers.warn(f"{stopping}, and no checkpoint could be saved: {why}")
                else:
                    self.loggers.warn(f"{stopping}; {path} is saved, and the same command resumes from it")
            raise

    def state(self) -> dict[str, Any]:
        """All state that no model, optimizer or environment holds."""
        return {
            "step": self.step_number,
            "validation_due": self.validation_due,
            "unlogged": dict(self.unlogged),
            "critic_warmup": self.critic_warmup.state_dict(),
            "alarms": self.alarms.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        self.step_number = self.saved_step = state["step"]
        self.unlogged = state["unlogged"]
        self.validation_due = state["validation_due"] and self.can_evaluate
        self.critic_warmup.load_state_dict(state["critic_warmup"])
        if "alarms" in state:  # not in older checkpoints
            self.alarms.load_state_dict(state["alarms"])
