"""A run on two nodes whose ranks, nodes, disk and driver fail at random moments, beside one that is undisturbed.

Two raylets beside the head are the nodes, with a rank each. One run meets all faults, one after the other; where a
fault ends the command, the same command is given again.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from benchmarks.chaos.kills import different_bits
from tests.execution.processes import marked, processes_of
from tests.trainer.loops import contents, results
from tests.trainer.tiny_run import GAE, base_overrides, write_inputs
from tether.commands.train import train
from tether.config import load_config
from tether.metrics.loggers.jsonl import METRICS_FILE, read_metrics
from tether.trainer import Callbacks

STEPS = "steps.txt"
"""In the folder of a run: a line for each step that was done."""
STEPS_PER_FAULT, SPARE_STEPS = 4, 16
SILENCE = 15
"""Seconds until a rank that is stopped is given up."""
PAUSE = 3.0
PATIENCE = 600.0
"""Seconds for a run to go on after a fault, and for its processes to end."""
MARK = "TETHER_SOAK"


@dataclass
class Soak:
    """The run that is disturbed."""

    folder: Path
    overrides: list[str]
    cluster: Cluster
    noise: random.Random
    driver: BaseProcess = field(init=False)
    commands: int = 0
    """Starts of the command, by hand or not."""

    def __post_init__(self) -> None:
        self.command()

    def command(self) -> None:
        """Give the command that starts or resumes the run."""
        self.driver, self.commands = _start(self.overrides, self.folder), self.commands + 1

    def ranks(self) -> dict[str, int]:
        """Log -> process of each rank, once all are there."""
        return _wait(lambda: found if len(found := processes_of(self.folder)) == 2 else None, "ranks do not start")

    def one(self) -> int:
        """The process of a rank."""
        return self.noise.choice(list(self.ranks().values()))

    def last_step(self) -> int:
        """That was logged."""
        return max(read_metrics(self.folder), default=0) if (self.folder / METRICS_FILE).exists() else 0

    def goes_on(self) -> bool:
        """Whether two more steps are done, by the same command if this one has ended."""
        before, until = self.last_step(), time.monotonic() + PATIENCE
        while self.last_step() < before + 2 and time.monotonic() < until:
            if not self.driver.is_alive():
                _wait(lambda: not processes_of(self.folder), "ranks outlive their driver")
                self.command()
            time.sleep(0.2)
        return self.last_step() >= before + 2


def _kill(soak: Soak) -> None:
    os.kill(soak.one(), signal.SIGKILL)


def _stop(soak: Soak) -> None:
    os.kill(soak.one(), signal.SIGSTOP)


def _pause(soak: Soak) -> None:
    process = soak.one()
    os.kill(process, signal.SIGSTOP)
    time.sleep(PAUSE)
    os.kill(process, signal.SIGCONT)


def _kill_driver(soak: Soak) -> None:
    soak.driver.kill()
    soak.driver.join()


def _fill_disk(soak: Soak) -> None:
    resource.prlimit(soak.one(), resource.RLIMIT_FSIZE, (4096, 4096))


def _remove_node(soak: Soak) -> None:
    nodes = [node for node in soak.cluster.list_all_nodes() if not node.head]
    soak.cluster.remove_node(soak.noise.choice(nodes), allow_graceful=False)
    soak.cluster.add_node(num_cpus=1)


FAULTS: Mapping[str, Callable[[Soak], None]] = {
    "`kill -9` of a rank": _kill,
    "a rank is stopped (SIGSTOP)": _stop,
    f"a rank is stopped for {PAUSE:g} s, and goes on": _pause,
    "`kill -9` of the driver": _kill_driver,
    "the disk is full for one rank": _fill_disk,
    "a node is removed, with its rank": _remove_node,
}


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
    left: tuple[str, ...]
    """Commands of processes that outlived the run and the cluster."""

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


def measure(folder: Path, faults: int, seed: int = 0) -> Result:
    """Disturb a run so many times, each kind of fault about as often."""
    os.environ |= {MARK: "1", "RAY_worker_niceness": "0"}
    inputs, noise = write_inputs(folder / "inputs"), random.Random(seed)
    names = [name for _, name in zip(range(faults), _again(list(FAULTS)), strict=False)]
    noise.shuffle(names)
    steps = STEPS_PER_FAULT * faults + SPARE_STEPS
    survived: Counter[str] = Counter()
    with _nodes() as cluster:
        soak = Soak(folder / "disturbed", _overrides(inputs, folder / "disturbed", cluster, steps), cluster, noise)
        soak.goes_on()
        for number, name in enumerate(names, 1):
            time.sleep(noise.uniform(0, 1))
            FAULTS[name](soak)
            survived[name] += (went_on := soak.goes_on())
            print(f"{number:>3} {'' if went_on else 'NOT '}survived, step {soak.last_step():>3}: {name}", flush=True)
        _wait(lambda: not soak.driver.is_alive(), "the run does not end")
        whole = _start(_overrides(inputs, folder / "whole", cluster, steps), folder / "whole")
        whole.join()
        assert whole.exitcode == 0, (folder / "whole/output.txt").read_text()
    left = [line for line in marked(MARK) if "multiprocessing" not in line]  # it started the commands
    done = (soak.folder / STEPS).read_text().split()
    last = f"global_step_{steps}"
    one, other = results(folder / "whole"), results(soak.folder)
    return Result(
        Counter(names),
        survived,
        soak.commands,
        len(done) - len(set(done)),
        different_bits(contents(folder / "whole" / last), contents(soak.folder / last)),
        sum(different_bits(one.get(step), other.get(step)) > 0 for step in one.keys() | other.keys()),
        tuple(left),
    )


def _again(names: list[str]) -> Iterator[str]:
    while True:
        yield from names


@contextmanager
def _nodes() -> Iterator[Cluster]:
    cluster = Cluster()
    cluster.add_node(num_cpus=0, include_dashboard=False)
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def _overrides(inputs: Path, folder: Path, cluster: Cluster, steps: int) -> list[str]:
    return [
        *base_overrides(inputs, folder), *GAE, f"trainer.total_training_steps={steps}", "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2", "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.preflight=False",
        f"trainer.max_restarts={steps}", f"trainer.max_silence={SILENCE}", "trainer.logger=file",
        f"ray_kwargs.ray_init={{address: '{cluster.address}'}}",
    ]  # fmt: skip


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
