"""The true score while PPO raises a learned one: `recipes/reward-model`, three seeds.

    python -m benchmarks.overoptimisation
    python -m benchmarks.overoptimisation --write recipes/reward-model/README.md --plot docs/assets/reward-model.png

Each seed makes a policy, pairs and a reward model of its own, then trains with a weak and a strong KL penalty.
Runs that are done are kept in --results and not made again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.resumable import ROOT, all_runs, arguments_of_runs, fields, save_figure, write_between
from tether.metrics.loggers.jsonl import read_metrics

BEGIN, END = "<!-- overoptimisation:begin -->", "<!-- overoptimisation:end -->"
WEIGHTS = (0.001, 0.1)
"""Of the KL penalty: that of the recipe, and one that holds the policy back."""
TOKENS = 16
"""Of a response."""
WINDOW = 10
"""Steps whose mean is shown."""
KEYS = ("actor/reward_kl_penalty", "reward/extra/learned/mean", "reward/extra/gold/mean")
WARNED = re.compile(r"^warning: the training score rises .*?^step:(\d+) ", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Curve:
    """A run by its training batches, in means of `WINDOW` steps."""

    accuracy: float
    """Of the reward model on held-out pairs."""
    kl: list[float]
    """To the policy of the start, in nats a response."""
    learned: list[float]
    gold: list[float]
    warned: int | None
    """Step of the first warning that tests fall while training rises."""


def train(seed: int, weight: float) -> Curve:
    """Run the recipe; the two runs of a seed share policy, pairs and reward model."""
    base = ROOT / "runs/reward-model" / str(seed)
    folder = base / f"kl-{weight}"
    command = ["sh", "recipes/reward-model/run.sh", str(seed), f"algorithm.kl_ctrl.kl_coef={weight}"]
    command += [f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable"]
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PATH": search}, stdout=subprocess.PIPE, text=True, check=True
    )
    warned = WARNED.search(ended.stdout)
    pairs = [json.loads(line) for line in (base / "rm/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    accuracy = [line["rm/held_out_accuracy"] for line in pairs if "rm/held_out_accuracy" in line][-1]
    steps = read_metrics(folder)
    kl, learned, gold = (_means([steps[step][key] for step in sorted(steps) if key in steps[step]]) for key in KEYS)
    return Curve(accuracy, [TOKENS * nats for nats in kl], learned, gold, int(warned[1]) if warned else None)


def _means(values: Sequence[float]) -> list[float]:
    return [fmean(values[first : first + WINDOW]) for first in range(0, len(values), WINDOW)]


def table(curves: Mapping[tuple[int, float], Curve]) -> str:
    """A line a run."""
    heads = ["KL weight", "seed", "accuracy on held-out pairs", "KL at the end", "learned: first", "best gold", "last"]
    heads += ["gold: first", "best", "last", "warning at step"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for (seed, weight), curve in sorted(curves.items(), key=lambda item: (item[0][1], item[0][0])):
        at = curve.gold.index(max(curve.gold))
        numbers = [scores[place] for scores in (curve.learned, curve.gold) for place in (0, at, -1)]
        shown = [f"{weight:g}", str(seed), f"{curve.accuracy:.2f}", f"{curve.kl[-1]:.1f}"]
        lines.append(f"| {' | '.join([*shown, *(f'{number:.2f}' for number in numbers), str(curve.warned or '-')])} |")
    return "\n".join(lines)


def plot(curves: Mapping[tuple[int, float], Curve], path: Path) -> None:
    """Draw both scores over the KL."""
    figure, axes = fields(2, 9, 3.6, sharex=True)
    colours = {seed: f"C{number}" for number, seed in enumerate(sorted({seed for seed, _ in curves}))}
    for (seed, weight), curve in curves.items():
        weak = weight == WEIGHTS[0]
        for axis, scores in zip(axes, (curve.learned, curve.gold), strict=True):
            axis.plot(
                curve.kl, scores, "o-" if weak else "x--", color=colours[seed], markersize=3,
                label=f"seed {seed}, KL weight {weight:g}",
            )  # fmt: skip
    axes[0].set(title="learned score", xlabel="KL to the first policy, nats a response", ylabel="mean of 10 steps")
    axes[1].set(title="gold score", xlabel="KL to the first policy, nats a response")
    axes[1].legend(fontsize=7)
    save_figure(figure, path)


def main() -> None:
    """See the module."""
    parser = arguments_of_runs(__doc__, ROOT / "runs/overoptimisation.jsonl")
    given = parser.parse_args()
    asked: list[dict[str, Any]] = [{"seed": seed, "weight": weight} for seed in given.seeds for weight in WEIGHTS]
    found = all_runs(lambda **one: asdict(train(**one)), asked, given.results, made_only=given.made_only)
    curves = {
        (one["seed"], one["weight"]): Curve(**run) for one, run in zip(asked, found, strict=True) if run is not None
    }
    if not curves:
        parser.error(f"{given.results}: holds none of these runs")
    print(found_table := table(curves))
    if given.write:
        write_between(given.write, BEGIN, END, found_table)
    if given.plot:
        plot(curves, given.plot)


if __name__ == "__main__":
    main()
