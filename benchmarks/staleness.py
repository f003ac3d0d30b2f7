"""Does asynchronous training learn as well? The same task at several stalenesses, three seeds each, as a table.

    python -m benchmarks.staleness                           # about ten minutes of one core
    python -m benchmarks.staleness --write docs/evidence/async.md
    python -m benchmarks.staleness --task quickstart         # hours of one core; what is done is kept in --results

The task is `spell` of `benchmarks.algorithms`: letters to spell, a random model of two layers, GRPO with four optimizer
steps a rollout, whose learning rate is the one of that table. Or the quickstart recipe with SmolLM2-135M-Instruct, by
GRPO and with half the prompts a step: a third of the time of its PPO. Scores are means over the seeds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import tether
from benchmarks.algorithms.cases import ACTOR, ALGORITHM, CORRECTION, GRPO, ROLLOUT, SHARED
from benchmarks.algorithms.tasks import SPELL, overrides, write_inputs
from benchmarks.resumable import QUICKSTART, ROOT, all_runs, arguments_of_runs, plot_scores, schedule, write_between
from tether.metrics.loggers.headline import evaluation_score
from tether.metrics.loggers.jsonl import read_metrics
from tether.runtime.machine import set_threads

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


def spell(steps: int, seed: int, folder: Path) -> tuple[Path | None, list[str]]:
    """The task of `benchmarks.algorithms`: its recipe, of which there is none, and settings."""
    write_inputs(SPELL, seed, folder)
    return None, [*overrides(SPELL, steps, seed, folder), *SHARED, GRPO]


def quickstart(steps: int, seed: int, folder: Path) -> tuple[Path | None, list[str]]:
    """The recipe, and settings: neither critic nor reference, at the rate of GRPO in `benchmarks.servers`."""
    return QUICKSTART, [
        *schedule(steps, seed, folder),
        GRPO,
        f"{ALGORITHM}.use_kl_in_reward=false",
        f"{ACTOR}.optim.lr=2e-5",
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=4",
        "trainer.val_before_train=false",
        "trainer.num_threads=1",
    ]


Task = Callable[[int, int, Path], tuple[Path | None, list[str]]]
TASKS: dict[str, tuple[Task, int]] = {"spell": (spell, 40), "quickstart": (quickstart, 40)}
"""A task and its steps."""


def train(task: str, mode: str, seed: int, steps: int) -> Run:
    """Train once."""
    with tempfile.TemporaryDirectory() as folder:
        recipe, settings = TASKS[task][0](steps, seed, Path(folder))
        metrics = read_metrics(tether.train(recipe, [*settings, *MODES[mode]]).folder)
    curve = [metrics[step]["critic/score/mean"] for step in range(1, steps + 1)]
    ages = [metrics[step].get("training/staleness", 0.0) for step in range(1, steps + 1)]
    return Run(evaluation_score(metrics[steps]), curve, fmean(ages))


def table(runs: Mapping[str, Sequence[Run]], steps: int) -> str:
    """A line per mode: scores at a quarter, half and the end of the run, and held out."""
    at = (steps // 4, steps // 2, steps)
    heads = ["", "seeds", "staleness", *(f"step {step}" for step in at), "held out (worst seed)"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for mode, seeds in runs.items():
        curve = [fmean(run.curve[step - 1] for run in seeds) for step in at]
        cells = [f"{fmean(run.staleness for run in seeds):.2f}", *(f"{score:.2f}" for score in curve)]
        ends = [run.end for run in seeds]
        lines.append(f"| {mode} | {len(seeds)} | {' | '.join(cells)} | {fmean(ends):.2f} ({min(ends):.2f}) |")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = arguments_of_runs(__doc__, ROOT / "runs/staleness.jsonl")
    parser.add_argument("--task", choices=TASKS, default="spell")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, help="instead of the task's own number")
    given = parser.parse_args()
    set_threads(1)
    steps = given.steps or TASKS[given.task][1]
    asked = [
        {"task": given.task, "mode": mode, "seed": seed, "steps": steps} for seed in given.seeds for mode in given.modes
    ]

    def make(**one: Any) -> dict[str, Any]:
        return asdict(train(**one))

    found = all_runs(make, asked, given.results, made_only=given.made_only)
    runs: dict[str, list[Run]] = {mode: [] for mode in given.modes}
    for one, result in zip(asked, found, strict=True):
        if result is not None:
            runs[one["mode"]].append(Run(**result))
    runs = {mode: seeds for mode, seeds in runs.items() if seeds}
    if not runs:
        parser.error(f"{given.results}: holds none of these runs")
    print(shown := table(runs, steps))
    if given.write:
        write_between(
            given.write, f"<!-- staleness_{given.task}:begin -->", f"<!-- staleness_{given.task}:end -->", shown
        )
    if given.plot:
        plot_scores({given.task: {mode: [run.curve for run in seeds] for mode, seeds in runs.items()}}, given.plot)


if __name__ == "__main__":
    main()
