"""The standard streams of a command: that one is closed, full or gone ends nothing that does not need it."""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import suppress
from typing import TextIO

logger = logging.getLogger(__name__)

_outlives = False
"""Whether the command goes on where nobody gets its output any more."""


class OutputLost(OSError):
    """What a command was asked to print cannot be written: a full disk, a terminal that is gone."""


def prepare_standard_streams() -> None:
    """Open the standard streams that are closed, and guard the others; characters that they cannot write are replaced.

    Whoever writes to standard output meets BrokenPipeError or `OutputLost` once, unless the command outlives that
    (`outlive_lost_output`); on standard error nobody ever does. What comes later goes nowhere.
    """
    _open_what_is_closed()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None or (stream is getattr(sys, f"__{name}__") and type(stream) is io.TextIOWrapper):
            setattr(sys, name, _guarded(stream, descriptor))
        elif isinstance(stream, io.TextIOWrapper):
            with suppress(ValueError):  # a stream that was closed
                stream.reconfigure(errors="replace")


def outlive_lost_output() -> None:
    """Let the command go on to its end, and exit as usual, where its standard output is lost; a warning says so."""
    global _outlives
    _outlives = True


def say_that_output_is_lost(error: OSError) -> None:
    """Warn, once, that nothing is shown any more."""
    why = "nobody reads it any more" if isinstance(error, BrokenPipeError) else error.strerror
    logger.warning("console output is switched off (%s); the run continues", why)


def discard(descriptor: int) -> None:
    """Let what is written to a descriptor go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _open_what_is_closed() -> None:
    """Else the next file would be opened in their place, and get what processes print and say."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest one that is free


def _guarded(stream: TextIO | None, descriptor: int) -> TextIO:
    raw = io.BufferedWriter(_Guarded(descriptor))
    if not isinstance(stream, io.TextIOWrapper):
        return io.TextIOWrapper(raw, errors="replace", line_buffering=True)
    stream.flush()
    return io.TextIOWrapper(
        raw,
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Guarded(io.FileIO):
    """Writes to a descriptor until that fails."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            discard(self.fileno())
            if self.fileno() == 1 and not _outlives:
                if isinstance(error, BrokenPipeError):
                    raise
                raise OutputLost(error.errno, f"standard output cannot be written ({error.strerror})") from None
            if self.fileno() == 1:
                say_that_output_is_lost(error)
            return memoryview(data).nbytes  # type: ignore[arg-type]
