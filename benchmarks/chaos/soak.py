"""One run that meets faults, one after the other, beside the same run that is undisturbed."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.chaos.kills import different_bits
from tests.distributed.processes import marked
from tests.runs.loops import contents, results
from tether.commands.train import train
from tether.config import load_config
from tether.loop.parts import Callbacks
from tether.metrics.loggers.jsonl import METRICS_FILE, read_metrics

STEPS = "steps.txt"
"""In the folder of a run: a line for each step that was done."""
STEPS_PER_FAULT, SPARE_STEPS = 4, 16
PATIENCE = 600.0
"""Seconds for a run to go on after a fault, and for its processes to end."""
MARK = f"TETHER_SOAK_{os.getpid()}"
"""Variable in the environment of all processes of this soak."""
Processes = Callable[[Path], Mapping[str, int]]
"""Folder of a run -> name and process of what the command has started and waits for."""


@dataclass
class Soak:
    """The run that is disturbed."""

    folder: Path
    overrides: list[str]
    noise: random.Random
    processes: Processes
    count: int
    """Of those processes, once all are there."""
    driver: BaseProcess = field(init=False)
    commands: int = 0
    """Starts of the command, by hand or not."""

    def __post_init__(self) -> None:
        self.command()

    def command(self) -> None:
        """Give the command that starts or resumes the run."""
        self.driver, self.commands = _start(self.overrides, self.folder), self.commands + 1

    def one(self) -> int:
        """One of the processes."""
        found: Mapping[str, int] = _wait(
            lambda: there if len(there := self.processes(self.folder)) >= self.count else None, "nothing starts"
        )
        return self.noise.choice(list(found.values()))

    def last_step(self) -> int:
        """That was logged."""
        return max(read_metrics(self.folder), default=0) if (self.folder / METRICS_FILE).exists() else 0

    def goes_on(self) -> bool:
        """Whether two more steps are done, by the same command if this one has ended."""
        before, until = self.last_step(), time.monotonic() + PATIENCE
        while self.last_step() < before + 2 and time.monotonic() < until:
            if not self.driver.is_alive():
                _wait(lambda: not self.processes(self.folder), "processes outlive their driver")
                self.command()
            time.sleep(0.2)
        return self.last_step() >= before + 2


Fault = Callable[[Soak], None]


def kill_driver(soak: Soak) -> None:
    """SIGKILL ends the command."""
    soak.driver.kill()
    soak.driver.join()


@dataclass(frozen=True)
class Result:
    """Of a whole soak."""

    tried: Counter[str]
    survived: Counter[str]
    commands: int
    done_again: int
    """Steps that were done a second time."""
    bits: int
    """In which the last checkpoint differs from that of the undisturbed run."""
    metrics: int
    """Steps whose metrics differ."""
    left: tuple[str, ...] = ()
    """Commands of processes that outlived the run."""

    @property
    def is_fine(self) -> bool:
        """Everything survived, with no bit lost and nothing left running."""
        return self.tried == self.survived and not (self.bits or self.metrics or self.left)

    def markdown(self) -> str:
        """The table."""
        rows = [f"| {name} | {count} | {self.survived[name]} |" for name, count in self.tried.items()]
        total = f"| all | {self.tried.total()} | {self.survived.total()} |"
        after = (
            f"Steps done again: {self.done_again}. Bits that differ at the end: {self.bits}; steps whose metrics "
            f"differ: {self.metrics}. Processes left running: {len(self.left)}. The command was given "
            f"{self.commands} times."
        )
        return "\n".join(["| fault | tried | survived |", "|---|---|---|", *rows, total, "", after])


def names_of(faults: Mapping[str, Fault], count: int, noise: random.Random) -> list[str]:
    """So many faults in a random order, each kind about as often."""
    names = [name for _, name in zip(range(count), _again(list(faults)), strict=False)]
    noise.shuffle(names)
    return names


def steps_of(names: Sequence[str]) -> int:
    """Steps of a run that meets these faults."""
    return STEPS_PER_FAULT * len(names) + SPARE_STEPS


def disturb(soak: Soak, faults: Mapping[str, Fault], names: Sequence[str], whole: tuple[Path, list[str]]) -> Result:
    """Let a run meet the named faults, each after the run has gone on, and compare it with an undisturbed one.

    Args:
        soak: the run.
        faults: name -> the fault.
        names: of the faults that it meets, in this order.
        whole: folder and overrides of the undisturbed run, which is made here.
    """
    survived: Counter[str] = Counter()
    soak.goes_on()
    for number, name in enumerate(names, 1):
        time.sleep(soak.noise.uniform(0, 1))
        faults[name](soak)
        survived[name] += (went_on := soak.goes_on())
        print(f"{number:>3} {'' if went_on else 'NOT '}survived, step {soak.last_step():>3}: {name}", flush=True)
    _wait(lambda: not soak.driver.is_alive(), "the run does not end")
    folder, overrides = whole
    undisturbed = _start(overrides, folder)
    undisturbed.join()
    assert undisturbed.exitcode == 0, (folder / "output.txt").read_text()
    done = (soak.folder / STEPS).read_text().split()
    last = f"global_step_{steps_of(names)}"
    one, other = _metrics(folder), _metrics(soak.folder)
    return Result(
        Counter(names),
        survived,
        soak.commands,
        len(done) - len(set(done)),
        different_bits(contents(folder / last), contents(soak.folder / last)),
        sum(different_bits(one.get(step), other.get(step)) > 0 for step in one.keys() | other.keys()),
    )


def left_running() -> tuple[str, ...]:
    """Commands of processes of the soak that still run."""
    return tuple(line for line in marked(MARK) if "multiprocessing" not in line)  # it started the commands


def _metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Without what was sent: a server that is started again gets its weights again."""
    return {
        step: {key: value for key, value in found.items() if not key.startswith("transfer/")}
        for step, found in results(folder).items()
    }


def _again(names: list[str]) -> Iterator[str]:
    while True:
        yield from names


class _Counting:
    """Notes each step that is done."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / STEPS

    def on_step_end(self, step: int, _: object) -> None:
        """See `Callbacks`."""
        with self._file.open("a") as file:
            file.write(f"{step}\n")


def _start(overrides: list[str], folder: Path) -> BaseProcess:
    """The command, in a process of its own whose output goes to a file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_drive, args=(overrides, folder))
    process.start()
    return process


def _drive(overrides: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    train(load_config(None, overrides), Callbacks([_Counting(folder)]))


def _wait(look: Callable[[], Any], complaint: str) -> Any:
    until = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > until:
            raise TimeoutError(complaint)
        time.sleep(0.1)
    return found
