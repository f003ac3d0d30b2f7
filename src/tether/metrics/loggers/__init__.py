"""Loggers by name. The library of a logger is only imported when the logger is requested."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol, runtime_checkable

from tether.metrics.loggers.headline import HELD_OUT_LOSS, VALIDATION, evaluation_score, validation_means
from tether.metrics.loggers.jsonl import (
    DISCARDED_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    read_metrics,
    read_samples,
)
from tether.metrics.loggers.own import own_logger
from tether.metrics.loggers.protocol import LogFailed, Logger, RunInfo, Sample
from tether.runtime.install import pip_install
from tether.spelling import did_you_mean

__all__ = [
    "DISCARDED_FILE",
    "EVENTS_FILE",
    "HELD_OUT_LOSS",
    "METRICS_FILE",
    "SAMPLES_FILE",
    "VALIDATION",
    "LogFailed",
    "Loggers",
    "RunInfo",
    "Sample",
    "build_loggers",
    "evaluation_score",
    "read_metrics",
    "read_samples",
    "validation_means",
]

_without_display = logging.getLogger(__name__)

LOGGERS: Mapping[str, str] = {
    "console": "tether.metrics.loggers.console:ConsoleLogger",
    "jsonl": "tether.metrics.loggers.jsonl:JsonlLogger",
    "tensorboard": "tether.metrics.loggers.tensorboard:TensorboardLogger",
    "wandb": "tether.metrics.loggers.wandb:WandbLogger",
    "mlflow": "tether.metrics.loggers.mlflow:MlflowLogger",
    "trackio": "tether.metrics.loggers.trackio:TrackioLogger",
    "swanlab": "tether.metrics.loggers.swanlab:SwanlabLogger",
}
"""Name -> module:class, called with a `RunInfo`. The name of a new logger must also be added to ``LoggerName`` of
`tether.loop.config`."""
ALIASES: Mapping[str, str] = {"file": "jsonl"}
"""verl's names for tether's loggers."""


@runtime_checkable
class PhaseDisplay(Protocol):
    """A logger that also shows the current phase of the run."""

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Show that the run is in this phase, and its progress in it."""
        ...


@runtime_checkable
class WarningDisplay(Protocol):
    """A logger that also shows messages to the user."""

    def warn(self, message: str) -> None:
        """Show a warning."""
        ...


@runtime_checkable
class KeepsWarnings(Protocol):
    """A logger that also writes messages to the user into a file."""

    def keep_warning(self, message: str) -> None:
        """Write a warning."""
        ...


@runtime_checkable
class TakesNotes(Protocol):
    """A logger that cannot log everything unchanged, and reports what it changed."""

    def take_notes(self) -> list[str]:
        """Return notes for the user, each once."""
        ...


class Loggers:
    """All loggers of a run, behind the interface of a single one."""

    def __init__(self, loggers: Mapping[str, Logger]) -> None:
        self._loggers = loggers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for logger in self._loggers.values():
            logger.log(step, metrics)
            for note in logger.take_notes() if isinstance(logger, TakesNotes) else ():
                self.warn(note)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for logger in self._loggers.values():
            logger.log_samples(step, samples)

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Show the current phase on loggers with a display: "gen", 12 of 64 responses done."""
        for logger in self._loggers.values():
            if isinstance(logger, PhaseDisplay):
                logger.phase(name, done, total)

    def warn(self, message: str) -> None:
        """Show a warning on loggers with a display; without one, log it with Python's logging."""
        displays = [display for display in self._loggers.values() if isinstance(display, WarningDisplay)]
        for display in displays:
            display.warn(message)
        if not displays:
            _without_display.warning(message)  # recorded by the loggers' warning files, too
            return
        for logger in self._loggers.values():
            if isinstance(logger, KeepsWarnings):
                logger.keep_warning(message)

    def close(self) -> None:
        """Close all loggers, even if one fails."""
        with ExitStack() as stack:
            for logger in reversed(list(self._loggers.values())):
                stack.callback(logger.close)


def build_loggers(names: str | Sequence[str], run: RunInfo) -> Loggers:
    """Build the loggers that `trainer.logger` names; jsonl is always included.

    Args:
        names: a name or a list of names of `LOGGERS`, or ``FILE.py:NAME`` for a user-defined logger (`own_logger`).
        run: the run that they belong to.

    Raises:
        ValueError: a name is unknown, its library is not installed, or a file does not define the logger.
    """
    requested = [names] if isinstance(names, str) else list(names)
    ordered = dict.fromkeys(["jsonl", *(ALIASES.get(name, name) for name in requested)])
    factories = {name: _load(name) for name in ordered}  # check all names before any logger writes
    return Loggers({name: factory(run) for name, factory in factories.items()})


def _load(name: str) -> Callable[[RunInfo], Logger]:
    if name.rpartition(":")[0].endswith(".py"):
        return own_logger(name)
    if name not in LOGGERS:
        hint = did_you_mean(name, LOGGERS) or " Choose among them."
        raise ValueError(f"trainer.logger: unknown logger {name!r}.{hint} Loggers: {', '.join(LOGGERS)}")
    module_name, class_name = LOGGERS[name].split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"trainer.logger: {name!r} needs the package {error.name!r}, which is not installed. "
            f"Run: {pip_install(name)}, or take {name!r} out of trainer.logger."
        ) from error
    return getattr(module, class_name)
