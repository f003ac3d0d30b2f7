"""Is a tool that pays learned? A random model, three seeds, in a few minutes on one core.

    python -m benchmarks.turn_learning
    python -m benchmarks.turn_learning --write recipes/gsm8k-calculator/README.md

The task of `tests/runs/turn_run.py`: a digit is asked for that the tool alone knows, one of two. A tool that answers
is worth 0.2, a digit 0.2, the right one 0.6; the best without the tool is 0.5 on average. The control is the same run
with calls that are never answered.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.resumable import write_between
from tests.runs.tiny_run import measured, train
from tests.runs.turn_run import ROLLOUT, turn_overrides, write_turn_inputs

BEGIN, END = "<!-- learned:begin -->", "<!-- learned:end -->"
STEPS, LAST = 40, 5
SETTINGS = [
    "actor_rollout_ref.actor.optim.lr=5e-3",
    "actor_rollout_ref.actor.entropy_coeff=0.02",
    f"trainer.total_training_steps={STEPS}",
]
KEYS = ("critic/score/mean", "reward/extra/tool_calls/mean")


def run_seed(seed: int, *more: str) -> list[str]:
    """Score and calls a row: of the first step, and over the last ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_turn_inputs(Path(name), digits="0101", seed=1, std=0.2)
        options = [*turn_overrides(folder, folder / "run"), *SETTINGS, f"trainer.seed={seed}", *more]
        metrics = measured(train(options))
    last = range(STEPS - LAST + 1, STEPS + 1)
    pairs = ((metrics[1][key], sum(metrics[step][key] for step in last) / LAST) for key in KEYS)
    return [f"{number:.2f}" for pair in pairs for number in pair]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    arguments = parser.parse_args()
    lines = [
        f"| seed | score of step 1 | of the last {LAST} of {STEPS} | calls a row in step 1 | at the end |",
        "|---|---|---|---|---|",
    ]
    for seed in arguments.seeds:
        lines.append("| " + " | ".join([str(seed), *run_seed(seed)]) + " |")
    unanswered = run_seed(arguments.seeds[0], f"{ROLLOUT}.multi_turn.max_assistant_turns=1")
    lines.append("| " + " | ".join([f"{arguments.seeds[0]}, calls never answered", *unanswered]) + " |")
    print(*lines, sep="\n")
    if arguments.write:
        write_between(arguments.write, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    main()
