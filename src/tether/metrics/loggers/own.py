"""User-defined loggers, ``FILE.py:NAME``: a class that is called with a `RunInfo` and only needs the method `log`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tether.metrics.loggers.protocol import Logger, RunInfo, Sample
from tether.runtime.user_files import definition

KEY = "trainer.logger"
METHODS: Mapping[str, tuple[str, ...]] = {
    "log": ("step", "metrics"),
    "log_samples": ("step", "samples"),
    "close": (),
    "phase": ("name", "done", "total"),
    "warn": ("message",),
}
"""Method -> its arguments; all methods except `log` are optional."""


class HasLog(Protocol):
    """A logger with its one required method."""

    @property
    def log(self) -> Callable[..., None]:
        """Return the method that receives a step and its metrics."""
        ...


class OwnLogger:
    """Adapter of a user-defined logger; methods that it does not define do nothing."""

    def __init__(self, logger: HasLog) -> None:
        self._logger = logger
        self.log = logger.log
        for optional in ("phase", "warn"):  # the loop only calls these methods if the logger has them
            if hasattr(logger, optional):
                setattr(self, optional, getattr(logger, optional))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        if hasattr(self._logger, "log_samples"):
            self._logger.log_samples(step, samples)

    def close(self) -> None:
        if hasattr(self._logger, "close"):
            self._logger.close()


def own_logger(name: str) -> Callable[[RunInfo], Logger]:
    """Check the signatures of a user-defined logger and return its factory, which is called once, at the start of the
    run.

    Raises:
        ValueError: the file or class does not exist, or the class or a method has other arguments.
    """
    logger_class = definition(name, KEY)
    where = f"{KEY}={name}"
    if not isinstance(logger_class, type):
        raise ValueError(f"{where}: is a {type(logger_class).__name__}; expected a class with log(step, metrics)")
    _check(logger_class, ("run",), f"{where}: {logger_class.__name__}")
    if not callable(getattr(logger_class, "log", None)):
        raise ValueError(f"{where}: has no method log(step, metrics)")
    for method, arguments in METHODS.items():
        if hasattr(logger_class, method):
            _check(getattr(logger_class, method), ("self", *arguments), f"{where}: {method}")
    return lambda run: OwnLogger(logger_class(run))


def _check(function: Callable[..., object], arguments: Sequence[str], name: str) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments)
    except TypeError:
        listed = ", ".join(argument for argument in arguments if argument != "self")
        raise ValueError(f"{name}{signature} is called with ({listed})") from None
