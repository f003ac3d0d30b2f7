"""A logger of the user's, ``FILE.py:NAME``: a class that is called with the `RunInfo`; only its `log` is needed."""

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
"""Method -> its arguments; all but `log` may be missing."""


class HasLog(Protocol):
    """The one method that a logger needs."""

    @property
    def log(self) -> Callable[..., None]:
        """Of a step and its metrics."""
        ...


class OwnLogger:
    """The methods that a user's logger has; the others do nothing."""

    def __init__(self, logger: HasLog) -> None:
        self._logger = logger
        self.log = logger.log
        for optional in ("phase", "warn"):  # a logger that has them is shown phases and warnings
            if hasattr(logger, optional):
                setattr(self, optional, getattr(logger, optional))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """See `Logger.log_samples`."""
        if hasattr(self._logger, "log_samples"):
            self._logger.log_samples(step, samples)

    def close(self) -> None:
        """See `Logger.close`."""
        if hasattr(self._logger, "close"):
            self._logger.close()


def own_logger(name: str) -> Callable[[RunInfo], Logger]:
    """The factory of the logger, with its signatures checked; it is called once, when the run begins.

    Raises:
        ValueError: no such file or class, it takes other arguments, or a method does.
    """
    found = definition(name, KEY)
    where = f"{KEY}={name}"
    if not isinstance(found, type):
        raise ValueError(f"{where}: is a {type(found).__name__}; expected a class with log(step, metrics)")
    _check(found, ("run",), f"{where}: {found.__name__}")
    if not callable(getattr(found, "log", None)):
        raise ValueError(f"{where}: has no method log(step, metrics)")
    for method, arguments in METHODS.items():
        if hasattr(found, method):
            _check(getattr(found, method), ("self", *arguments), f"{where}: {method}")
    return lambda run: OwnLogger(found(run))


def _check(function: Callable[..., object], arguments: Sequence[str], name: str) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments)
    except TypeError:
        given = ", ".join(argument for argument in arguments if argument != "self")
        raise ValueError(f"{name}{signature} is called with ({given})") from None
