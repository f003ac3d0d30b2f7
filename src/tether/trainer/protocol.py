"""Protocols of the parts of the training loop: the methods that it calls, for text and control alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tether.batch import WeightUpdate
from tether.metrics.loggers import Sample
from tether.metrics.timing import Timer
from tether.types import StateDict

Progress = Callable[[int, int], None]
"""Called with (done, of all)."""
Dealt = TypeVar("Dealt", covariant=True)
"""The tasks of a step: prompts, or seeds of start states."""
Taken = TypeVar("Taken", contravariant=True)
Batch = TypeVar("Batch")
Details = TypeVar("Details")
"""Anything else that a collector knows of its batch; the loop only hands it back."""


@dataclass(frozen=True)
class Experience(Generic[Batch, Details]):
    """The rollout of a step."""

    batch: Batch
    details: Details
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationResult:
    """Results of a validation."""

    metrics: dict[str, float]
    samples: list[Sample] = field(default_factory=list)
    """All responses, in the order of the dataset."""


class Stateful(Protocol):
    """Keeps something from one step to the next."""

    def state_dict(self) -> StateDict:
        """All of it, for a checkpoint."""
        ...

    def load_state_dict(self, state: StateDict) -> None:
        """Take over what `state_dict` gave."""
        ...


class Source(Stateful, Protocol[Dealt]):
    """Deals what each step begins with."""

    def next(self, step: int) -> Dealt:
        """The tasks of training step `step`, counted from 1."""
        ...

    def metrics(self) -> dict[str, float]:
        """Position of the source before the next tasks."""
        ...


class RewardTransform(Stateful, Protocol[Taken]):
    """Changes ``token_level_rewards`` before advantages are estimated."""

    def apply(self, batch: Taken) -> dict[str, float]:
        """Change the rewards in place; returns metrics."""
        ...


class Rollouts(Stateful, Protocol[Taken, Batch, Details]):
    """Acts with the current policy, in training and in validation."""

    @property
    def can_evaluate(self) -> bool:
        """There is something to test the policy on."""
        ...

    def begin(self, step: int) -> None:
        """Called once before the first step of a run that starts or resumes after `step` steps."""
        ...

    def collect(self, tasks: Taken, step: int, time: Timer, progress: Progress) -> Experience[Batch, Details]:
        """Sample with the current policy, and score.

        Args:
            tasks: of the step.
            step: number of the training step, from 1; with the seed it names every random draw.
            time: takes the seconds of phases.
            progress: called while sampling.
        """
        ...

    def record(self, step: int, experience: Experience[Batch, Details], time: Timer) -> None:
        """Write down what was sampled, where the user asked for it; the batch has its advantages."""
        ...

    def metrics(self, experience: Experience[Batch, Details], outputs: Any, time: Timer) -> dict[str, float]:
        """Metrics of a step that is done.

        Args:
            experience: with all that the step filled in.
            outputs: of the policy at the start of the update; None where they were not computed.
            time: of the phases, with "step" the whole.
        """
        ...

    def metrics_to_log(self) -> dict[str, float]:
        """Metrics of what happened since the last log."""
        ...

    def logged(self) -> None:
        """Called after `metrics_to_log` was logged."""
        ...

    def load_weights(self, weights: WeightUpdate) -> None:
        """Sample with these weights from now on; free where they are shared."""
        ...

    def evaluate(self, step: int, progress: Progress) -> EvaluationResult:
        """Validate the current policy after `step` steps."""
        ...

    def freeze(self, *, in_step: bool) -> Frozen:
        """The part of a checkpoint that the rollouts add to their `state_dict`.

        Args:
            in_step: a step was begun after `state_dict`, and failed.
        """
        ...

    def saved(self, step: int) -> None:
        """Called after a checkpoint of `step` steps was written, and the run goes on."""
        ...

    def restore(self, checkpoint: Path) -> None:
        """Take over the files of a checkpoint, before `load_state_dict`."""
        ...


@dataclass(frozen=True)
class Frozen:
    """The part of a checkpoint that the rollouts write."""

    state: Mapping[str, Any] = field(default_factory=dict)
    """Replaces entries of `Rollouts.state_dict`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Name -> content."""
