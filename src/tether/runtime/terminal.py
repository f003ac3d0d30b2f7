"""Terminal output that shows the text of models, data and rewards without executing its control sequences."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress
from rich.segment import Segment
from rich.table import Table

from tether.runtime.printable import printable
from tether.runtime.standard_streams import discard, warn_output_lost

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
_MAX_WIDTH = 1000
"""Maximum columns of output to a file or a pipe."""


def one_line(text: str) -> str:
    """Return `printable` text on one line, with line ends as ⏎ and tabs as spaces."""
    return printable(text).replace("\n", "⏎").replace("\t", " ")


def shortened(text: str, width: int) -> str:
    """Shorten text to `width` characters: its start and, twice as long, its end, which usually contains the answer."""
    if len(text) <= width:
        return text
    head = (width - 3) // 3
    return f"{text[:head]} … {text[len(text) - (width - 3 - head) :]}"


class Screen(Console):
    """A rich console for text from any source; it disables markup and removes non-printable characters.

    It stops writing after a broken pipe, for which rich itself would end the process.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False} | options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        # All output passes through here, so this is where it is made printable.
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; lines and tables are only fitted to a terminal's width, not in a file or a pipe."""
        if self.is_terminal or not all(
            isinstance(item, str) or (isinstance(item, Table) and not item.expand) for item in objects
        ):
            return super().print(*objects, **options)
        width, self.width = self.width, _MAX_WIDTH
        try:
            super().print(*objects, **{"soft_wrap": all(isinstance(item, str) for item in objects)} | options)
        finally:
            self.width = width

    def on_broken_pipe(self) -> None:
        self._mute(BrokenPipeError())

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:  # a closed terminal, a full disk
            self._mute(error)

    def _mute(self, error: OSError) -> None:
        """Stop writing, and report that once; later output is dropped without an error."""
        self.quiet = True
        del self._buffer[:]
        with suppress(OSError, ValueError):  # not a real file
            discard(self.file.fileno())
        warn_output_lost(error)


class Heartbeat:
    """Calls a function from a separate thread whenever no output was shown for `EVERY` seconds."""

    EVERY = 8.0
    """Interval in seconds, chosen so that even on a busy machine the screen changes at least every ten seconds."""

    def __init__(self, show: Callable[[], None]) -> None:
        self._show, self._shown, self._closed = show, monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Restart the interval, because output was shown."""
        self._shown = monotonic()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(max(0.0, self._shown + self.EVERY - monotonic())):
            if monotonic() - self._shown >= self.EVERY:
                self.reset()
                with suppress(OSError, ValueError):  # the stream was closed, which the next output will report
                    self._show()


class Activity:
    """Reports what a command is doing until it prints other output, and repeats that if it takes long."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._what: str | None = None
        self._begun = monotonic()

    def __enter__(self) -> Activity:
        self._heartbeat = Heartbeat(self._repeat)
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeat.close()

    def begin(self, what: str) -> None:
        self._what, self._begun = what, monotonic()
        self._heartbeat.reset()
        self._print(f"{what} ...")

    def _repeat(self) -> None:
        if self._what is not None:
            self._print(f"{self._what} ... {clock(monotonic() - self._begun)}")

    def _print(self, line: str) -> None:
        self._screen.print(line, style="dim", soft_wrap=True)
        self._screen.file.flush()


class Waiting:
    """Progress of long work: a bar on a terminal, or a line every `EVERY` seconds in a file or pipe.

    Args:
        what: name of the items.
        total: number of items; None: unknown.
        screen: console for the progress.
        done: number of items completed before.
        late: show the bar only after `QUIET` seconds, for work that is usually short.
    """

    EVERY = 10.0
    """Seconds between lines."""
    QUIET = 2.0
    """Seconds before a `late` bar appears."""

    def __init__(self, what: str, total: int | None, screen: Screen, done: int = 0, *, late: bool = False) -> None:
        self._what, self._total, self._screen, self._begun_with = what, total, screen, done
        self._begun = self._said = monotonic()
        self._quiet = self.QUIET if late else 0.0
        self._bar = Progress(console=screen, transient=True) if screen.is_terminal else None
        self._task = self._bar.add_task(what, total=total, completed=done) if self._bar else None

    def __enter__(self) -> Waiting:
        if self._bar and self._quiet <= 0:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar and self._bar.live.is_started:
            self._bar.stop()

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items, and show how many have been yielded."""
        for number, item in enumerate(items, start=1):
            self.show(number)
            yield item

    def show(self, done: int, note: str = "", total: int | None = None) -> None:
        """Show the number of completed items and a note; `total` sets a total that was unknown before."""
        self._total = self._total if total is None else total
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done, total=self._total, description=note or None)
            if not self._bar.live.is_started and monotonic() - self._begun >= self._quiet:
                self._bar.start()
        elif monotonic() - self._said >= self.EVERY:
            self._said = monotonic()
            of = "" if self._total is None else f"/{self._total}"
            fields = (f"{self._what}:{done}{of}", note, self._left(done))
            self._screen.print(" - ".join(filter(None, fields)), soft_wrap=True)

    def _left(self, done: int) -> str:
        if self._total is None or done <= self._begun_with or done >= self._total:
            return ""
        pace = (monotonic() - self._begun) / (done - self._begun_with)
        return f"eta:{clock(pace * (self._total - done))}"


def clock(seconds: float) -> str:
    """Format seconds as minutes and seconds, with hours if needed."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
