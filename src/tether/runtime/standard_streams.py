"""The standard streams of a command: a closed, full or disconnected stream only ends commands that need it."""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import suppress
from typing import TextIO

logger = logging.getLogger(__name__)

_continues_without_output = False
"""Whether the command continues after its standard output is lost."""


class OutputLost(OSError):
    """Output that the command was asked to print cannot be written, for example because of a full disk."""


def prepare_standard_streams() -> None:
    """Open closed standard streams, and guard the others; characters that cannot be encoded are replaced.

    If standard output fails, the writer gets BrokenPipeError or `OutputLost` once, unless `continue_without_output` was
    called. Standard error never raises. Later output is discarded.
    """
    _open_closed_descriptors()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None or (stream is getattr(sys, f"__{name}__") and type(stream) is io.TextIOWrapper):
            setattr(sys, name, _guarded(stream, descriptor))
        elif isinstance(stream, io.TextIOWrapper):
            with suppress(ValueError):  # the stream was closed
                stream.reconfigure(errors="replace")


def continue_without_output() -> None:
    """Let the command run to its normal end if its standard output is lost; a warning reports the loss."""
    global _continues_without_output
    _continues_without_output = True


def warn_output_lost(error: OSError) -> None:
    """Warn once that output is no longer shown."""
    why = "nobody reads it any more" if isinstance(error, BrokenPipeError) else error.strerror
    logger.warning("console output is switched off (%s); the run continues", why)


def discard(descriptor: int) -> None:
    """Redirect a file descriptor to the null device."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _open_closed_descriptors() -> None:
    """Open closed standard descriptors on the null device. Otherwise the next opened file would get their numbers, and
    with them everything that processes print."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free descriptor


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
    """Writes to a file descriptor until a write fails, and discards later output."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            discard(self.fileno())
            if self.fileno() == 1 and not _continues_without_output:
                if isinstance(error, BrokenPipeError):
                    raise
                raise OutputLost(error.errno, f"standard output cannot be written ({error.strerror})") from None
            if self.fileno() == 1:
                warn_output_lost(error)
            return memoryview(data).nbytes  # type: ignore[arg-type]
