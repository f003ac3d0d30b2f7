"""The protocol of loggers, which receive the metrics of each step, and samples for people to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from errno import EFBIG
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class RunInfo:
    """The run that a logger belongs to."""

    directory: Path
    """Folder of the run, for the files of the loggers."""
    project: str
    experiment: str
    config: Mapping[str, object]
    """The resolved configuration, a tree of plain values."""
    total_steps: int | None = None
    """Number of steps that the run will take, if known."""
    resumed_step: int | None = None
    """Step of the checkpoint that the run resumes from; None for a fresh run."""


@dataclass(frozen=True)
class Sample:
    """A response for people to read, with its reward."""

    index: int
    """Row of the dataset, which identifies the sample in every table and file."""
    data_source: str
    prompt: str
    """The prompt as the policy reads it."""
    response: str
    reward: float | None
    """None if the reward abstained or failed."""
    ground_truth: object = None
    note: str = ""
    """The reason for a missing reward."""
    truncated: bool = False
    """Whether the response was cut by the length limit."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Further values that the reward returned with the score, such as `acc`, `reason` and its components."""


class LogFailed(OSError):
    """A log could not be written; the message names the file and the fix."""


def log_failed(path: Path, error: OSError) -> LogFailed:
    """Return the error for a log file that cannot be written, including the fix."""
    fix = "Raise the limit (ulimit -f)" if error.errno == EFBIG else "Free space on that disk or make it writable"
    return LogFailed(
        error.errno,
        f"{path}: cannot be written ({error.strerror}). {fix}, and start the same command again; or name another "
        "folder with trainer.default_local_dir",
    )


class Logger(Protocol):
    """Receives the results of a run; constructed with a `RunInfo`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step. Steps never decrease within a process."""
        ...

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Record the samples of a validation."""
        ...

    def close(self) -> None:
        """Write what is pending; nothing is logged afterwards."""
        ...
