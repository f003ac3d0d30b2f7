"""Loggers by name. The library behind a name is imported when the name is asked for."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from tether.metrics.loggers.headline import VALIDATION, score_of_test, validation_means
from tether.metrics.loggers.jsonl import METRICS_FILE, read_metrics, read_samples
from tether.metrics.loggers.own import own_logger
from tether.metrics.loggers.protocol import LogFailed, Logger, RunInfo, Sample
from tether.runtime.install import pip_install
from tether.spelling import did_you_mean

__all__ = [
    "METRICS_FILE",
    "VALIDATION",
    "LogFailed",
    "Loggers",
    "RunInfo",
    "Sample",
    "build_loggers",
    "read_metrics",
    "read_samples",
    "score_of_test",
    "validation_means",
]

_without_display = logging.getLogger(__name__)

LOGGERS: Mapping[str, str] = {
    "console": "tether.metrics.loggers.console:ConsoleLogger",
    "jsonl": "tether.metrics.loggers.jsonl:JsonlLogger",
    "tensorboard": "tether.metrics.loggers.tensorboard:TensorboardLogger",
    "wandb": "tether.metrics.loggers.wandb:WandbLogger",
    "mlflow": "tether.metrics.loggers.mlflow:MlflowLogger",
}
"""Name -> module:class; the class is called with a `RunInfo`."""
ALIASES: Mapping[str, str] = {"file": "jsonl"}
"""verl's name for a logger of ours."""


@runtime_checkable
class PhaseDisplay(Protocol):
    """A logger that also shows what the run is doing right now."""

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Show that the run is in this phase, and how far it is in it."""
        ...


@runtime_checkable
class WarningDisplay(Protocol):
    """A logger that also shows messages to whoever watches the run."""

    def warn(self, message: str) -> None:
        """Show a warning."""
        ...


class Loggers:
    """All loggers of a run, behind the interface of one."""

    def __init__(self, loggers: Mapping[str, Logger]) -> None:
        self._loggers = loggers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        for logger in self._loggers.values():
            logger.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """See `Logger.log_samples`."""
        for logger in self._loggers.values():
            logger.log_samples(step, samples)

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Show the current phase where it can be shown: "gen", 12 of 64 responses done."""
        for logger in self._loggers.values():
            if isinstance(logger, PhaseDisplay):
                logger.phase(name, done, total)

    def warn(self, message: str) -> None:
        """Show a warning on the screens among the loggers; without one, by Python's logging."""
        displays = [display for display in self._loggers.values() if isinstance(display, WarningDisplay)]
        for display in displays:
            display.warn(message)
        if not displays:
            _without_display.warning(message)

    def close(self) -> None:
        """See `Logger.close`."""
        for logger in self._loggers.values():
            logger.close()


def build_loggers(names: str | Sequence[str], run: RunInfo) -> Loggers:
    """Build the loggers that `trainer.logger` names; jsonl is always among them.

    Args:
        names: a name or a list of names of `LOGGERS`, or ``FILE.py:NAME`` of the user's (`own_logger`).
        run: which run they belong to.

    Raises:
        ValueError: an unknown name, one whose library is not installed, or a file without such a logger.
    """
    requested = [names] if isinstance(names, str) else list(names)
    ordered = dict.fromkeys(["jsonl", *(ALIASES.get(name, name) for name in requested)])
    factories = {name: _load(name) for name in ordered}  # every name is checked before a logger writes anything
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
