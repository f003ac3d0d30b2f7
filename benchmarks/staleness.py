"""Does asynchronous training learn as well? The same task at several stalenesses, three seeds each, as a table.

    python -m benchmarks.staleness                         # about five minutes of one core
    python -m benchmarks.staleness --write docs/async.md   # fills the page

The task is `spell` of `benchmarks.algorithms`: letters to spell, a random model of two layers, GRPO with four optimizer
steps a rollout, whose learning rate is the one of that table. Scores are means over the seeds of sampled answers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.algorithms.cases import CORRECTION, GRPO, ROLLOUT, SHARED
from benchmarks.algorithms.tasks import SPELL, train
from benchmarks.resumable import write_between
from tether.metrics.loggers.jsonl import read_metrics
from tether.runtime.machine import usable_cores

BEGIN, END = "<!-- staleness:begin -->", "<!-- staleness:end -->"
STEPS, SEEDS = 40, (1, 2, 3)
CORRECTED = (f"{CORRECTION}.rollout_is=token",)


def _fully(staleness: int) -> tuple[str, ...]:
    return ("trainer.async_mode=fully_async", f"{ROLLOUT}.max_staleness={staleness}")


MODES: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "one step off": ("trainer.async_mode=one_step_off",),
    "one step off, corrected": ("trainer.async_mode=one_step_off", *CORRECTED),
    "fully asynchronous, 1": _fully(1),
    "fully asynchronous, 1, corrected": (*_fully(1), *CORRECTED),
    "fully asynchronous, 4": _fully(4),
    "fully asynchronous, 4, corrected": (*_fully(4), *CORRECTED),
    "fully asynchronous, 16": _fully(16),
    "fully asynchronous, 16, corrected": (*_fully(16), *CORRECTED),
}


@dataclass(frozen=True)
class Run:
    """One seed of one mode."""

    end: float
    """Held-out score after the last step."""
    curve: list[float]
    """Score of each training batch."""
    staleness: float
    """Mean updates between sampling and learning."""


def run(mode: str, seed: int) -> Run:
    """Train once, in a process of its own."""
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        learned = train(SPELL, (*SHARED, GRPO, *MODES[mode]), steps=STEPS, seed=seed, folder=Path(folder))
        metrics = read_metrics(Path(folder) / "run")
    ages = [metrics[step].get("training/staleness", 0.0) for step in range(1, STEPS + 1)]
    return Run(learned.end, list(learned.curve), fmean(ages))


def row(mode: str, runs: list[Run]) -> str:
    """A line of the table."""
    curve = [fmean(run.curve[step - 1] for run in runs) for step in (10, 20, 40)]
    ends = [run.end for run in runs]
    cells = [f"{fmean(run.staleness for run in runs):.2f}", *(f"{score:.2f}" for score in curve)]
    return f"| {mode} | {' | '.join(cells)} | {fmean(ends):.2f} ({min(ends):.2f}) |"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=usable_cores())
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {mode: [pool.submit(run, mode, seed) for seed in SEEDS] for mode in MODES}
        lines = []
        for mode, runs in waiting.items():
            lines.append(row(mode, [one.result() for one in runs]))
            print(lines[-1], file=sys.stderr, flush=True)
    head = "|  | staleness | step 10 | step 20 | step 40 | held out (worst seed) |"
    table = "\n".join([head, "|---|---|---|---|---|---|", *lines])
    print(table)
    if arguments.write:
        write_between(arguments.write, BEGIN, END, table)


if __name__ == "__main__":
    main()
