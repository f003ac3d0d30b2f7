"""Does it learn? Runs a recipe for several seeds and prints held-out scores before and after.

    python -m benchmarks.learning --quick           # 3 seeds of recipes/quickstart
    python -m benchmarks.learning --quick --plot docs/assets/quickstart.png \\
        --write README.md recipes/quickstart/README.md
    python -m benchmarks.learning critic.optim.lr=1e-5 --seeds 1 2 3 4 5
    python -m benchmarks.learning --recipe recipes/fetch-reach/run.yaml --score eval/success_at_end

Beside the scores stand the number of distinct held-out questions that they are over, and what always giving the most
frequent answer would score. --write puts the table between the `learning` marks of pages.

Each seed is a run of its own in OUT/seed_N; --plot draws the scores of all of them into one picture, and
`tether plot OUT/seed_* --mean` everything else.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.resumable import write_between
from tether.metrics.loggers.headline import validation_means
from tether.metrics.loggers.jsonl import read_metrics
from tether.metrics.plot import plot_run

BEGIN, END = "<!-- learning:begin -->", "<!-- learning:end -->"
ROOT = Path(__file__).resolve().parent.parent


def run_seed(recipe: Path, seed: int, folder: Path, overrides: list[str]) -> float:
    """Train one seed; returns the seconds that it took."""
    start = time.perf_counter()
    fixed = [f"trainer.seed={seed}", f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable"]
    command = "from tether.commands.cli import main; main()"
    subprocess.run([sys.executable, "-c", command, "train", str(recipe), *overrides, *fixed], cwd=ROOT, check=True)
    return time.perf_counter() - start


def scores(folder: Path, key: str | None) -> dict[int, float]:
    """The metric `key` by step; without one the mean held-out score at each validation."""
    steps = read_metrics(folder)
    if key is not None:
        return {step: metrics[key] for step, metrics in steps.items() if key in metrics}
    tested = {step: validation_means(metrics) for step, metrics in steps.items()}
    return {step: sum(means.values()) / len(means) for step, means in tested.items() if means}


def questions(folder: Path) -> str:
    """Distinct held-out questions of the last validation, and the score of always giving the most frequent answer."""
    tested = [metrics for metrics in read_metrics(folder).values() if validation_means(metrics)]
    last = tested[-1] if tested else {}
    distinct = sum(value for key, value in last.items() if key.endswith("/num_distinct"))
    majority = [value for key, value in last.items() if key.endswith("/majority_answer")]
    best_constant = f"{sum(majority) / len(majority):.3f}" if majority else "    -"
    return f"{distinct:>9.0f}  {best_constant:>8}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three seeds (the default)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes/quickstart/run.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/learning")
    parser.add_argument("--score", help="the metric that counts; default: the mean of all validation scores")
    parser.add_argument("--plot", type=Path, help="write the curves of all seeds to this PNG")
    parser.add_argument("--write", type=Path, nargs="+", default=[], help="pages whose table is replaced")
    parser.add_argument("--title", help="of that picture: the model and the task")
    parser.add_argument("overrides", nargs="*", help="configuration overrides, KEY=VALUE")
    arguments = parser.parse_args()
    folders = [arguments.out / f"seed_{seed}" for seed in arguments.seeds]
    lines = []
    for seed, folder in zip(arguments.seeds, folders, strict=True):
        seconds = run_seed(arguments.recipe.resolve(), seed, folder, arguments.overrides)
        tested = scores(folder, arguments.score)
        first, last = tested[min(tested)], tested[max(tested)]
        change = f"{first:.3f}   {last:.3f}  {last - first:+.3f}"
        lines.append(f"{seed:>4}  {change}  {questions(folder)}   {max(tested):>5}  {seconds / 60:.1f}")
    where = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    header = "seed  start   end    change  questions  majority   steps  minutes"
    print(f"\n{arguments.recipe}, {where}", header, *lines, sep="\n")
    note = (
        f"{where}. Greedy score over `questions` distinct held-out questions, none of which occurs in training;\n"
        "`majority` is what always giving the most frequent answer would score."
    )
    for page in arguments.write:
        write_between(page, BEGIN, END, "\n".join(["```text", header, *lines, "```", "", note]))
    if arguments.plot:
        validation = sorted({key for f in folders for m in read_metrics(f).values() for key in validation_means(m)})
        shown = [arguments.score, "env/return"] if arguments.score else [*validation, "critic/score/mean"]
        print(plot_run(folders, arguments.plot, shown, mean=True, title=arguments.title))


if __name__ == "__main__":
    main()
