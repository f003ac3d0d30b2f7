"""Recipes beside their plans here: python -m benchmarks.plan.recipes --data DATA --write docs/guides/plan.md

Trains some steps of each recipe, with smaller batches where a step would take minutes, and compares memory and time
with what `tether plan` says. The first recipe calibrates: the last column has the plans of the others corrected by its
times, as `tether plan RUN` keeps them. DATA has gsm8k/train.parquet (`tether data pull`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.resumable import ROOT, write_between
from benchmarks.speed.machine import machine_line
from benchmarks.speed.table import grid
from tether.plan.comparison import compare
from tether.plan.devices import GIB, measured

BEGIN, END = "<!-- recipes:begin -->", "<!-- recipes:end -->"
HEAD = ("recipe", "memory, planned", "measured", "ratio", "a step, planned", "measured", "ratio", "ratio, calibrated")
STEPS = 3
SMALL = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
RECIPES: dict[str, tuple[str, ...]] = {
    "quickstart/run": (),
    "gsm8k-smollm2/run": SMALL,
    "gsm8k-calculator/run": SMALL,
    "gsm8k-qwen/ppo_lora": SMALL,
    "gsm8k-qwen/grpo_lora": SMALL,
}
"""Recipe -> what is changed, so that a step takes half a minute."""


def train(recipe: str, changes: tuple[str, ...], data: Path, folder: Path) -> None:
    """Train a few steps, and keep a checkpoint that has the configuration."""
    gsm8k = data / "gsm8k/train.parquet"
    own_data = () if recipe.startswith("quickstart") else (f"data.train_files={gsm8k}", f"data.val_files={gsm8k}")
    short = [f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1", "trainer.val_before_train=False"]
    saved = ["trainer.save_freq=-1", f"trainer.default_local_dir={folder}"]
    command = [sys.executable, "-m", "tether", "train", f"recipes/{recipe}.yaml", *changes, *own_data, *short, *saved]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=[*RECIPES], help="some of the recipes")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    options = parser.parse_args()
    device, lines, corrections = measured(), list[list[str]](), dict[str, float]()
    for recipe in options.only:
        with TemporaryDirectory() as folder:
            train(recipe, RECIPES[recipe], options.data, run := Path(folder) / "run")
            plain, calibrated = compare(run, device, {}), compare(run, device, corrections)
        assert plain.peak is not None
        planned, peak = plain.peak
        interval, seconds = plain.seconds["step"]
        again = f"{calibrated.seconds['step'][0].middle / seconds:.2f}" if corrections else "-"
        lines.append(
            [recipe + (", 4 prompts a step" if RECIPES[recipe] else ""),
             f"{planned / GIB:.1f} GiB", f"{peak / GIB:.1f} GiB", f"{planned / peak:.2f}",
             f"{interval.low:.3g} to {interval.high:.3g} s", f"{seconds:.3g} s", f"{interval.middle / seconds:.2f}",
             again]
        )  # fmt: skip
        corrections = corrections or dict(plain.corrections)
        print("\n".join(grid(HEAD, lines)), flush=True)
    text = "\n".join([*grid(HEAD, lines), "", f"{machine_line()}."])
    if options.write:
        write_between(options.write, BEGIN, END, text)


if __name__ == "__main__":
    main()
