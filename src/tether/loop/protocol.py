"""Protocols of the objects that the training loop calls, for both text and control."""

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
"""Called with (done, total)."""
Tasks_co = TypeVar("Tasks_co", covariant=True)
"""The tasks of a step: prompts, or the seeds of start states."""
Tasks_contra = TypeVar("Tasks_contra", contravariant=True)
Batch_contra = TypeVar("Batch_contra", contravariant=True)
Batch = TypeVar("Batch")
Details = TypeVar("Details")
"""A collector's own data about its batch, which the loop passes back to it unchanged."""


@dataclass(frozen=True)
class Experience(Generic[Batch, Details]):
    """The rollout of a step: its batch and the collector's details."""

    batch: Batch
    details: Details
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation."""

    metrics: dict[str, float]
    samples: list[Sample] = field(default_factory=list)
    """All responses in the order of the dataset."""


@dataclass(frozen=True)
class CheckpointExtras:
    """Additions of the rollouts to a checkpoint."""

    state: Mapping[str, Any] = field(default_factory=dict)
    """Entries that replace those of `Rollouts.state_dict`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of files by name."""


class Stateful(Protocol):
    """An object with state that persists between steps; the default implementation has none."""

    def state_dict(self) -> StateDict:
        """Return the state for a checkpoint."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned."""
        return


class Source(Stateful, Protocol[Tasks_co]):
    """Provides the tasks of each step."""

    def next(self, step: int) -> Tasks_co:
        """Return the tasks of training step `step`, counted from 1."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics of the source's position before it provides the next tasks."""
        return {}


class RewardTransform(Stateful, Protocol[Batch_contra]):
    """Changes ``token_level_rewards`` before advantages are estimated."""

    def apply(self, batch: Batch_contra) -> dict[str, float]:
        """Change the rewards in place and return metrics."""
        ...


class Rollouts(Stateful, Protocol[Tasks_contra, Batch, Details]):
    """Acts with the current policy, in training and evaluation; by default it has no state and no files."""

    @property
    def can_evaluate(self) -> bool:
        """Whether there are prompts or environments to evaluate the policy on."""
        ...

    def begin(self, step: int) -> None:
        """Prepare for the first step of a run that starts or resumes after `step` steps."""
        return

    def collect(self, tasks: Tasks_contra, step: int, time: Timer, progress: Progress) -> Experience[Batch, Details]:
        """Sample with the current policy and score the samples.

        Args:
            tasks: the tasks of the step.
            step: the training step, counted from 1, which determines every random draw together with the seed.
            time: records the seconds of phases.
            progress: called while sampling.
        """
        ...

    def record(self, step: int, experience: Experience[Batch, Details], time: Timer) -> None:
        """Write the samples to files if the user configured that; the batch has its advantages."""
        return

    def metrics(self, experience: Experience[Batch, Details], outputs: Any, time: Timer) -> dict[str, float]:
        """Return the metrics of a finished step.

        Args:
            experience: the rollout, with everything that the step added to it.
            outputs: outputs of the policy at the start of the update; None if they were not computed.
            time: seconds of the phases; "step" is the total.
        """
        ...

    def metrics_to_log(self) -> dict[str, float]:
        """Return metrics accumulated since the last log."""
        return {}

    def logged(self) -> None:
        """Reset the metrics of `metrics_to_log` after they were logged."""
        return

    def load_weights(self, weights: WeightUpdate) -> None:
        """Sample with these weights from now on; weights that are shared with the engine are not copied."""
        ...

    def evaluate(self, step: int, progress: Progress) -> EvaluationResult:
        """Evaluate the current policy after `step` steps."""
        ...

    def checkpoint_extras(self, *, in_step: bool) -> CheckpointExtras:
        """Return what a checkpoint contains in addition to `state_dict`.

        Args:
            in_step: whether a step failed after `state_dict` was called.
        """
        return CheckpointExtras()

    def checkpoint_saved(self, step: int) -> None:
        """Handle that the checkpoint of `step` steps was written; the run continues."""
        return

    def load_checkpoint(self, checkpoint: Path) -> None:
        """Load the files of a checkpoint, before `load_state_dict`."""
        return


class StepRecorder(Protocol):
    """Records samples or episodes of training steps."""

    @property
    def is_due(self) -> bool:
        """Whether to record the next step."""
        ...

    def record(self, step: int, experience: Any, before: Any, trained: Any) -> None:
        """Record a finished step.

        Args:
            step: the training step.
            experience: the `Experience`, with everything that the step added to it.
            before: outputs of the policy at the start of the update; None if they were not computed.
            trained: its outputs for each row of the batch while the update trained on it; None if it did not train, or
                if the engine does not return them.
        """
        ...
