"""Time saved by asynchronous training: measured steps beside a discrete-event model of the same times, as a table.

    python -m benchmarks.overlap                         # three minutes of two cores
    python -m benchmarks.overlap --write docs/evidence/async.md   # fills the page

The task is `spell` of `benchmarks.algorithms`, in two settings: *here*, where the sampler has the cores of the trainer
(one thread each), and *elsewhere*, where its time is waiting for the reward, as for a judge on another machine. The
model knows seconds of sampling (with scoring) and of training alone, and neither cores nor threads: what it says more
than is measured is what both sides take from each other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.algorithms.cases import CORRECTION, GRPO, ROLLOUT, SHARED
from benchmarks.algorithms.tasks import SPELL, train
from benchmarks.resumable import ROOT, all_runs, arguments_of_runs, write_between
from benchmarks.speed.machine import machine_line
from tether.metrics.loggers.jsonl import read_metrics

BEGIN, END = "<!-- overlap:begin -->", "<!-- overlap:end -->"
STEPS = 16
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "here": (f"{ROLLOUT}.max_num_seqs=16",),
    "elsewhere": (f"custom_reward_function.path={ROOT / 'benchmarks/waiting_reward.py'}",),
}
AHEAD = {"synchronous": 0, "one step off": 1, "fully asynchronous, 4": 4}
"""Batches that may be sampled before their step."""
MODES: Mapping[str, tuple[str, ...]] = {
    "synchronous": (),
    "one step off": ("trainer.async_mode=one_step_off",),
    "fully asynchronous, 4": ("trainer.async_mode=fully_async", f"{ROLLOUT}.max_staleness=4"),
}
FASTER = (0.5, 1, 2, 4, 8)
"""How much longer sampling takes than training, in the second table."""


@dataclass(frozen=True)
class Times:
    """Seconds of each step of a run."""

    sampling: list[float]
    """Of its batch: sampling and scoring."""
    training: list[float]
    """Of all else."""
    step: list[float]
    """Of the step, which waits for its batch."""


def makespan(sampling: Sequence[float], training: Sequence[float], ahead: int) -> float:
    """Seconds of a whole run by a discrete-event model of `tether.loop.ahead`: one sampler and one trainer.

    At the beginning of step k the batches up to k + `ahead` are asked for; the sampler draws one after the other, and a
    step begins to train when the step before has ended and its batch is there.

    Args:
        sampling: seconds of each batch.
        training: seconds of each step, without its batch.
        ahead: batches that may be asked for before their step; 0: sampler and trainer take turns.
    """
    begins: list[float] = []
    sampled = end = 0.0
    for step, (draws, trains) in enumerate(zip(sampling, training, strict=True)):
        begins.append(end)
        sampled = max(sampled, begins[max(step - ahead, 0)]) + draws
        end = max(begins[step], sampled) + trains
    return end


def run(setting: str, mode: str, seed: int) -> dict[str, list[float]]:
    """Train once."""
    torch.set_num_threads(1)
    disable_progress_bar()
    corrected = (f"{CORRECTION}.rollout_is=token",)
    with tempfile.TemporaryDirectory() as folder:
        settings = (*SHARED, GRPO, *corrected, *SETTINGS[setting], *MODES[mode])
        train(SPELL, settings, steps=STEPS, seed=seed, folder=Path(folder))
        metrics = read_metrics(Path(folder) / "run")
    steps = [metrics[step] for step in range(1, STEPS + 1)]
    waited = [one["timing_s/gen"] + one.get("timing_s/reward", 0.0) for one in steps]
    sampling = [one.get("timing_s/sampling", wait) for one, wait in zip(steps, waited, strict=True)]
    whole = [one["timing_s/step"] for one in steps]
    return asdict(Times(sampling, [step - wait for step, wait in zip(whole, waited, strict=True)], whole))


def table(found: Mapping[str, Mapping[str, Sequence[Times]]]) -> str:
    """Settings and modes, each with its runs; the first mode takes turns."""
    head = ["", "", "sampling s", "training s", "step s", "by the model", "won", "by the model of synchronous times"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for setting, modes in found.items():
        (turns, *_) = modes.values()
        took = sum(sum(one.step) for one in turns)
        for mode, runs in modes.items():
            whole = sum(sum(one.step) for one in runs)
            own = sum(makespan(one.sampling, one.training, AHEAD[mode]) for one in runs)
            told = sum(makespan(one.sampling, one.training, AHEAD[mode]) for one in turns)
            count = sum(len(one.step) for one in runs)
            sampling, training = (fmean(x for one in runs for x in part(one)) for part in (_sampling, _training))
            cells = [setting, mode, f"{sampling:.2f}", f"{training:.2f}", f"{whole / count:.2f}", f"{own / count:.2f}",
                     f"{took / whole:.2f}x", f"{took / told:.2f}x"]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_devices(turns: Sequence[Times]) -> str:
    """What the model says of samplers that are slower or faster, with the same spread over batches."""
    stalenesses = (1, 4)
    lines = ["| sampling / training | " + " | ".join(f"at most {k} ahead" for k in stalenesses) + " |"]
    lines.append("|---" * (1 + len(stalenesses)) + "|")
    sampling, training = ([x for one in turns for x in part(one)] for part in (_sampling, _training))
    for ratio in FASTER:
        scaled = [x * ratio * sum(training) / sum(sampling) for x in sampling]
        took = makespan(scaled, training, 0)
        lines.append(
            f"| {ratio:g} | " + " | ".join(f"{took / makespan(scaled, training, k):.2f}x" for k in stalenesses) + " |"
        )
    return "\n".join(lines)


def _sampling(times: Times) -> list[float]:
    return times.sampling


def _training(times: Times) -> list[float]:
    return times.training


def main() -> None:
    """See the module."""
    parser = arguments_of_runs(__doc__, ROOT / "runs/overlap.jsonl")
    parser.set_defaults(seeds=[1, 2])
    given = parser.parse_args()
    asked: list[dict[str, Any]] = [
        {"setting": setting, "mode": mode, "seed": seed}
        for seed in given.seeds
        for setting in SETTINGS
        for mode in MODES
    ]
    results = all_runs(run, asked, given.results, made_only=given.made_only)
    done = [(one, Times(**result)) for one, result in zip(asked, results, strict=True) if result]
    found = {
        setting: {
            mode: [times for one, times in done if (one["setting"], one["mode"]) == (setting, mode)] for mode in MODES
        }
        for setting in SETTINGS
    }
    text = "\n\n".join([f"On {machine_line()}.", table(found), "By the model alone, with the spread of *elsewhere*:",
                        table_of_devices(found["elsewhere"]["synchronous"])])  # fmt: skip
    print(text)
    if given.write:
        write_between(given.write, BEGIN, END, text)


if __name__ == "__main__":
    main()
