"""Text on its way to a terminal: whatever models, data and rewards wrote, it is shown and never obeyed."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from io import TextIOWrapper
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tether.runtime.printable import printable

logger = logging.getLogger(__name__)


def one_line(text: str) -> str:
    """`printable` text on one line: line ends as ⏎, tabs as spaces."""
    return printable(text).replace("\n", "⏎").replace("\t", " ")


def shortened(text: str, width: int) -> str:
    """At most `width` characters: of a longer text the beginning and, twice as much, the end, where answers stand."""
    if len(text) <= width:
        return text
    head = (width - 3) // 3
    return f"{text[:head]} … {text[len(text) - (width - 3 - head) :]}"


class Screen(Console):
    """A rich console for text of any origin: no markup, nothing but printable characters.

    It falls silent when nobody reads it any more; rich itself would end the process.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False} | options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See `rich.console.Console.render`; text is made printable here, where all of it passes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Stop writing, and say so once; what else is printed goes nowhere, and no error comes of it."""
        self.quiet = True
        with suppress(OSError, ValueError):  # not a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        logger.warning("console output is switched off (nobody reads it any more); the run continues")


def replace_what_the_terminal_cannot_write() -> None:
    """Let standard output and error replace characters that their encoding cannot write, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            with suppress(ValueError):  # a stream that was closed
                stream.reconfigure(errors="replace")
