"""The screen: a live display on a terminal, one line per step otherwise.

On a terminal each step prints a row, and a status line below the rows shows the current phase::

     step   score     val  ref kl  length  entropy  actor grad  expl var  s/step
       12   0.412       -  0.0031    21.4    1.203        1.31      0.44     6.1
    ━━━━━━━━━━━╸━━━━━━━━━━━━━━━  step 13/60   update_actor 12/32  3.4s   elapsed 1:24   left 5:02

The columns are the numbers that the run has logged so far; if they do not fit on the terminal, the least important
columns are omitted.

In a file or a pipe the same step is ``step:12 - critic/score/mean:0.412 - ...``. During a long step, a line such as
``step 13/60: update_actor 12/32, 34 s`` appears every few seconds.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tether.metrics.loggers.headline import LABELS, OPTIONAL_LABELS, headline_keys, headline_values
from tether.metrics.loggers.protocol import RunInfo, Sample
from tether.runtime.terminal import Heartbeat, Screen, clock, one_line, shortened

logger = logging.getLogger(__name__)

ROWS_PER_HEADER = 25
SAMPLES_SHOWN = 3
PROMPT_TAIL = 90
RESPONSE_WIDTH = 200
STEPS_OF_PACE = 10


class ConsoleLogger:
    """Shows a run on the screen.

    If writing to the screen fails, it is switched off with one warning and the run continues, because every number is
    also in `metrics.jsonl`.
    """

    def __init__(self, run: RunInfo, screen: Screen | None = None) -> None:
        screen = screen or Screen()
        live = screen.is_terminal and not screen.is_dumb_terminal and screen.encoding.startswith("utf")
        self._display: _Display | None = (_Live if live else _Plain)(screen, _Pace(run))
        self._shown: int | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the headline numbers of a step; numbers that are logged later for the same step are not shown."""
        if step != self._shown:
            self._shown = step
            self._show(lambda display: display.log(step, metrics))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Show the first few samples: the end of the prompt, the response and its reward."""
        self._show(lambda display: display.log_samples(step, samples[:SAMPLES_SHOWN]))

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Show the current phase of the run."""
        self._show(lambda display: display.phase(_Phase(name, done, total)))

    def warn(self, message: str) -> None:
        self._show(lambda display: display.warn(message))

    def close(self) -> None:
        self._show(lambda display: display.close())

    def _show(self, action: Callable[[_Display], None]) -> None:
        if self._display is None:
            return
        try:
            action(self._display)
        except Exception as error:  # noqa: BLE001  a broken screen must not end a training run
            logger.warning("console output is switched off (%s: %s); the run continues", type(error).__name__, error)
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
    """Progress and remaining time, estimated as the mean time of recent steps times the remaining steps."""

    def __init__(self, run: RunInfo) -> None:
        self.total = run.total_steps
        self.step = run.resumed_step or 0
        self._start = time.monotonic()
        self._before_first: tuple[int, float] | None = None
        self._finished: deque[tuple[int, float]] = deque(maxlen=STEPS_OF_PACE + 1)  # (step, when)

    def finish(self, step: int) -> None:
        if not self._finished:
            self._before_first = (step - 1, self._start) if step > 0 else None  # step 0: validation before training
        elif self._finished[0][0] == 0:
            self._before_first = self._finished.popleft()
        self._finished.append((step, time.monotonic()))
        self.step = step

    def warming_up(self) -> bool:
        """Return whether only the first step, which includes compilation and filling caches, is finished so far."""
        return len(self._finished) < 2

    def running(self) -> str:
        """Return the label of the step in progress."""
        return f"step {self.step + 1}" if self.total is None else f"step {min(self.step + 1, self.total)}/{self.total}"

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def remaining(self) -> float | None:
        """Return the estimated remaining seconds; None while unknown."""
        if self.total is None or not self._finished:
            return None
        start = self._before_first if len(self._finished) == 1 else self._finished[0]
        if start is None:
            return None
        (first_step, first_time), (last_step, last_time) = start, self._finished[-1]
        if first_step == last_step:
            return None
        end = last_time + (last_time - first_time) / (last_step - first_step) * (self.total - last_step)
        return max(0.0, end - time.monotonic())


class _Plain:
    """Writes lines of text in the encoding of the stream."""

    def __init__(self, console: Screen, pace: _Pace) -> None:
        self._console = console
        self._pace = pace
        self._phase: _Phase | None = None
        self._phase_start = time.monotonic()
        self._heartbeat: Heartbeat | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.finish(step)
        remaining = self._pace.remaining()
        eta = [] if remaining is None else [f"eta:{'at most ' * self._pace.warming_up()}{clock(remaining)}"]
        self._print(" - ".join([f"step:{step}", *(f"{k}:{v}" for k, v in headline_keys(metrics).items()), *eta]))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            prompt, response, reward = _cells(sample)
            self._print(f"sample:{step} - row:{sample.index} - reward:{reward} - prompt:{prompt} - response:{response}")

    def phase(self, phase: _Phase) -> None:
        if self._phase is None or phase.name != self._phase.name:
            self._phase_start = time.monotonic()
        self._phase = phase
        self._heartbeat = self._heartbeat or Heartbeat(self._show_phase)

    def warn(self, message: str) -> None:
        self._print(f"warning: {one_line(message)}")

    def close(self) -> None:
        if self._heartbeat:
            self._heartbeat.close()
        self._console.file.flush()

    def _show_phase(self) -> None:
        self._print(f"{self._pace.running()}: {self._phase}, {time.monotonic() - self._phase_start:.0f} s")

    def _print(self, line: str) -> None:
        if self._heartbeat:
            self._heartbeat.reset()
        encoding = self._console.encoding
        self._console.file.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._console.file.flush()


class _Live:
    """Rows that stay on the screen, above a status line that is redrawn four times a second."""

    def __init__(self, console: Screen, pace: _Pace) -> None:
        self._console = console
        self._pace = pace
        self._rows = 0
        self._logged: set[str] = set()
        self._columns: tuple[str, ...] = ()
        self._phase = _Phase("starting", None, None)
        self._phase_start = time.monotonic()
        self._live = Live(get_renderable=self._status, console=console, refresh_per_second=4, transient=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._live.start()
        self._pace.finish(step)
        values = headline_values(metrics)
        self._logged |= set(values)
        columns = _columns(self._logged, self._console.width)
        if columns != self._columns or self._rows % ROWS_PER_HEADER == 0:
            self._columns, self._rows = columns, 0
            header = Text(_row("step", columns, {label: label for label in columns}), style="bold dim")
            self._console.print(header, overflow="crop", no_wrap=True)
        self._rows += 1
        self._console.print(Text(_row(str(step), columns, values)), overflow="crop", no_wrap=True)

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
        pace, remaining = self._pace, self._pace.remaining()
        in_phase = time.monotonic() - self._phase_start
        compiling = remaining is None and pace.warming_up()
        text = Text.assemble(
            (f"{pace.running()}   ", "bold"),
            (f"{self._phase} ", "cyan"),
            f"{in_phase:.0f}s   elapsed {clock(pace.elapsed())}",
            "" if remaining is None else f"   left {'at most ' * pace.warming_up()}{clock(remaining)}",
            ("   the first step also compiles, and is slower" if compiling else "", "dim"),
        )
        if pace.total is None:
            return Group(text)
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(ProgressBar(total=pace.total, completed=pace.step, width=28), text)
        return line


def _columns(logged: set[str], width: int) -> tuple[str, ...]:
    """Return the labels that have a number, without the least important ones if they do not all fit."""
    shown = [label for label in LABELS if label in logged]
    for label in OPTIONAL_LABELS:
        if len(_row("", shown, {})) >= width and label in shown:
            shown.remove(label)
    return tuple(shown)


def _row(step: str, columns: Sequence[str], values: Mapping[str, str]) -> str:
    return f"{step:>6}" + "".join(f"  {values.get(label, '-'):>{max(6, len(label))}}" for label in columns)


def _cells(sample: Sample) -> tuple[str, str, str]:
    prompt, response = one_line(sample.prompt), one_line(sample.response)
    shown_prompt = prompt if len(prompt) <= PROMPT_TAIL else "…" + prompt[-PROMPT_TAIL:]
    shown_response = shortened(response, RESPONSE_WIDTH)
    reward = sample.note or "none" if sample.reward is None else f"{sample.reward:.3g}"
    return shown_prompt, shown_response, one_line(reward)
