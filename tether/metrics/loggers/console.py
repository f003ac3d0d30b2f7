"""The screen: a live display on a terminal, a line a step elsewhere.

On a terminal each step leaves a row, and below the rows stands what the run is doing now::

     step   score     val      kl  length  entropy  actor grad  critic grad  expl. var  s/step
       12   0.412       -  0.0031    21.4    1.203        1.31         8.92       0.44     6.1
    ━━━━━━━━━━━╸━━━━━━━━━━━━━━━  step 13/60   update_actor 12/32  3.4s   elapsed 1:24   left 5:02

In a file or a pipe the same step is ``step:12 - critic/score/mean:0.412 - ...``.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tether.metrics.loggers.headline import HEADLINES, headline_keys, headline_values
from tether.metrics.loggers.protocol import RunInfo, Sample

logger = logging.getLogger(__name__)

COLUMNS = ("score", "val", *(headline.label for headline in HEADLINES[1:]))
ROWS_PER_HEADER = 25
SAMPLES_SHOWN = 3
PROMPT_TAIL = 90
RESPONSE_HEAD = 200
STEPS_OF_PACE = 10


class Screen(Console):
    """A rich console that falls silent when nobody reads it any more; rich itself would end the process."""

    def on_broken_pipe(self) -> None:
        """Stop writing, and say so once."""
        self.quiet = True
        logger.warning("console output is switched off (nobody reads it any more); the run goes on")


class ConsoleLogger:
    """Shows a run on the screen.

    A screen that fails (closed pipe, odd terminal) is switched off with one warning and the run goes on: every number
    is in `metrics.jsonl` too.
    """

    def __init__(self, run: RunInfo, screen: Screen | None = None) -> None:
        screen = screen or Screen(highlight=False)
        live = screen.is_terminal and not screen.is_dumb_terminal and screen.encoding.startswith("utf")
        self._display: _Display | None = (_Live if live else _Plain)(screen, _Pace(run))
        self._shown: int | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the headline numbers of a step; what is logged of it later, the time of its checkpoint, is not shown."""
        if step != self._shown:
            self._shown = step
            self._show(lambda display: display.log(step, metrics))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Show the first few samples: the end of the prompt, the response and its reward."""
        self._show(lambda display: display.log_samples(step, samples[:SAMPLES_SHOWN]))

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Show what the run is doing right now."""
        self._show(lambda display: display.phase(_Phase(name, done, total)))

    def warn(self, message: str) -> None:
        """Show a warning."""
        self._show(lambda display: display.warn(message))

    def close(self) -> None:
        """Give the terminal back."""
        self._show(lambda display: display.close())

    def _show(self, action: Callable[[_Display], None]) -> None:
        if self._display is None:
            return
        try:
            action(self._display)
        except Exception as error:  # noqa: BLE001  whatever is wrong with a screen, it must not end a training run
            logger.warning("console output is switched off (%s: %s); the run goes on", type(error).__name__, error)
            with suppress(Exception):
                self._display.close()
            self._display = None


@dataclass(frozen=True)
class _Phase:
    name: str
    done: int | None
    total: int | None

    def __str__(self) -> str:
        progress = "" if self.done is None else f" {self.done}" if self.total is None else f" {self.done}/{self.total}"
        return self.name + progress


class _Display(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None: ...

    def phase(self, phase: _Phase) -> None: ...

    def warn(self, message: str) -> None: ...

    def close(self) -> None: ...


class _Pace:
    """How far the run is, and when it will be done: the mean time of the last steps times the steps to go."""

    def __init__(self, run: RunInfo) -> None:
        self.total = run.total_steps
        self.step = run.resumed_step or 0
        self._start = time.monotonic()
        self._finished: deque[tuple[int, float]] = deque(maxlen=STEPS_OF_PACE + 1)  # (step, when)

    def finish(self, step: int) -> None:
        if not self._finished and step > 0:  # step 0 is the validation before training
            self._finished.append((step - 1, self._start))
        self._finished.append((step, time.monotonic()))
        self.step = step

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def left(self) -> float | None:
        """Seconds to go; None while it cannot be known."""
        if self.total is None or len(self._finished) < 2:
            return None
        (first_step, first_time), (last_step, last_time) = self._finished[0], self._finished[-1]
        if first_step == last_step:
            return None
        end = last_time + (last_time - first_time) / (last_step - first_step) * (self.total - last_step)
        return max(0.0, end - time.monotonic())


class _Plain:
    """Lines of text, in whatever encoding the stream has."""

    def __init__(self, console: Screen, pace: _Pace) -> None:
        self._console = console
        self._pace = pace

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.finish(step)
        left = self._pace.left()
        eta = [] if left is None else [f"eta:{_clock(left)}"]
        self._print(" - ".join([f"step:{step}", *(f"{k}:{v}" for k, v in headline_keys(metrics).items()), *eta]))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            prompt, response, reward = _cells(sample)
            self._print(f"sample:{step} - row:{sample.index} - reward:{reward} - prompt:{prompt} - response:{response}")

    def phase(self, phase: _Phase) -> None:
        pass  # only a live display shows what passes

    def warn(self, message: str) -> None:
        self._print(f"warning: {_one_line(message)}")

    def close(self) -> None:
        self._console.file.flush()

    def _print(self, line: str) -> None:
        encoding = self._console.encoding
        self._console.file.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._console.file.flush()


class _Live:
    """Rows that stay, and below them a line that is redrawn four times a second."""

    def __init__(self, console: Screen, pace: _Pace) -> None:
        self._console = console
        self._pace = pace
        self._rows = 0
        self._phase = _Phase("starting", None, None)
        self._phase_start = time.monotonic()
        self._live = Live(get_renderable=self._status, console=console, refresh_per_second=4, transient=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._live.start()
        self._pace.finish(step)
        if self._rows % ROWS_PER_HEADER == 0:
            self._console.print(
                Text(_row("step", {c: c for c in COLUMNS}), style="bold dim"), overflow="crop", no_wrap=True
            )
        self._rows += 1
        self._console.print(Text(_row(str(step), headline_values(metrics))), overflow="crop", no_wrap=True)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        table = Table(
            "prompt", "response", "reward", title=f"validation samples, step {step}", title_justify="left", expand=True
        )
        for sample in samples:
            table.add_row(*(Text(cell) for cell in _cells(sample)))
        self._console.print(table)

    def phase(self, phase: _Phase) -> None:
        self._live.start()
        if phase.name != self._phase.name:
            self._phase_start = time.monotonic()
        self._phase = phase

    def warn(self, message: str) -> None:
        self._console.print(Text(f"warning: {message}", style="yellow"))

    def close(self) -> None:
        self._live.stop()

    def _status(self) -> RenderableType:
        pace, left = self._pace, self._pace.left()
        of_total = "" if pace.total is None else f"/{pace.total}"
        running = pace.step + 1 if pace.total is None else min(pace.step + 1, pace.total)
        in_phase = time.monotonic() - self._phase_start
        text = Text.assemble(
            (f"step {running}{of_total}   ", "bold"),
            (f"{self._phase} ", "cyan"),
            f"{in_phase:.0f}s   elapsed {_clock(pace.elapsed())}",
            "" if left is None else f"   left {_clock(left)}",
        )
        if pace.total is None:
            return Group(text)
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(ProgressBar(total=pace.total, completed=pace.step, width=28), text)
        return line


def _row(step: str, values: Mapping[str, str]) -> str:
    return f"{step:>6}" + "".join(f"  {values.get(label, '-'):>{max(6, len(label))}}" for label in COLUMNS)


def _cells(sample: Sample) -> tuple[str, str, str]:
    prompt, response = _one_line(sample.prompt), _one_line(sample.response)
    shown_prompt = prompt if len(prompt) <= PROMPT_TAIL else "…" + prompt[-PROMPT_TAIL:]
    shown_response = response if len(response) <= RESPONSE_HEAD else response[:RESPONSE_HEAD] + "…"
    reward = sample.note or "none" if sample.reward is None else f"{sample.reward:.3g}"
    return shown_prompt, shown_response, _one_line(reward)


def _one_line(text: str) -> str:
    """Make a text safe to print: line ends as ⏎, control characters (which could drive the terminal) as spaces."""
    return "".join(c if c.isprintable() else " " for c in text.replace("\n", "⏎"))


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
