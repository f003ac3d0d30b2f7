"""Which code a training step enters, for text and for control.

    python -m benchmarks.tracing --files --write docs/reference/architecture.md

Two tiny runs are trained through `tether.train`: PPO on text with a critic, a reference, GAE and the KL in the reward,
and PPO on CartPole. `sys.settrace` sees every function of this process that is called; nothing is timed. The second
step is the plain one, the third ends with a validation and a checkpoint.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import tether
from benchmarks.algorithms.tasks import SPELL, overrides, write_inputs
from benchmarks.speed.table import grid

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src/tether"
BEGIN, END = "<!-- trace:begin -->", "<!-- trace:end -->"
STEPS = 3
CORE = (
    "algorithms", "batch.py", "checkpoints", "control/learning", "keyed_random.py", "loop", "metrics", "runtime",
    "text/learning",
)  # fmt: skip
"""The loop, engines, losses, checkpoints and evaluation: without what samples and scores, and without models."""
OFTEN = ["trainer.logger=file", f"trainer.test_freq={STEPS}", f"trainer.save_freq={STEPS}"]

Functions = frozenset[tuple[Path, str]]
"""(file, qualified name) of each function that was entered."""


class Tracer:
    """Collects the functions below a folder that are entered while it is on, without comprehensions and lambdas."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._entered: set[tuple[str, str]] = set()

    def start(self) -> None:
        """Begin with the functions that are running now."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            self._enter(frame, "call", None)
            frame = frame.f_back
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def stop(self) -> Functions:
        """The functions since `start`."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        found = frozenset((Path(file), name) for file, name in self._entered)
        self._entered.clear()
        return found

    def _enter(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._folder) and not code.co_name.startswith("<"):
            self._entered.add((code.co_filename, code.co_qualname))


class Steps:
    """A callback that traces the second step, and the third with its validation and checkpoint."""

    def __init__(self) -> None:
        self._tracer = Tracer(PACKAGE)
        self.plain: Functions = frozenset()
        self.whole: Functions = frozenset()

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        if step == STEPS - 1:
            self.plain = self._tracer.stop()
        if step < STEPS:
            self._tracer.start()

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.whole = self._tracer.stop()


def trace_text(folder: Path) -> Steps:
    """PPO with actor, critic, reference and GAE on six prompts of one letter."""
    steps = Steps()
    write_inputs(SPELL, 1, folder)
    ppo = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1"]
    ppo += ["actor_rollout_ref.actor.ppo_mini_batch_size=3"]
    tether.train(None, [*overrides(SPELL, STEPS, 1, folder), *ppo, *OFTEN], callbacks=[steps])
    return steps


def trace_control(folder: Path) -> Steps:
    """PPO on CartPole with two perceptrons, 2 environments and 32 steps a rollout."""
    steps = Steps()
    run = [
        "env.train.id=CartPole-v1", "env.train.total_num_envs=2", "env.train.max_steps_per_rollout_epoch=32",
        "env.eval.num_episodes=2", "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        f"trainer.total_env_steps={64 * STEPS}", "trainer.log_freq=1", f"trainer.default_local_dir={folder}",
    ]  # fmt: skip
    tether.train(None, [*run, *OFTEN], callbacks=[steps])
    return steps


def lines_of(files: set[Path]) -> int:
    """Lines of whole files."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def files_of(functions: Functions) -> set[Path]:
    """The files that a reader has to open."""
    return {file for file, _ in functions}


def lines_of_functions(functions: Functions) -> int:
    """Lines of these functions alone; those of a function inside another one count once."""
    return sum(len(_lines_of(file, {name for at, name in functions if at == file})) for file in files_of(functions))


def _lines_of(file: Path, names: set[str]) -> set[int]:
    found: set[int] = set()

    def visit(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = inside
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = inside + child.name
                if name in names and not isinstance(child, ast.ClassDef):
                    found.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
                name += "." if isinstance(child, ast.ClassDef) else ".<locals>."
            visit(child, name)

    visit(ast.parse(file.read_text(encoding="utf-8")), "")
    return found


def table(text: Steps, control: Steps) -> list[str]:
    """Files, lines and functions of a step, and what both kinds of runs share."""
    rows = []
    whole = "a step with validation and checkpoint"
    for name, ours, theirs in (
        ("a step", text.plain, control.plain),
        (whole, text.whole, control.whole),
        ("of it: loop, engine, loss, checkpoint, evaluation", core(text.whole), core(control.whole)),
    ):
        for kind, functions in (("text", ours), ("control", theirs), ("shared", ours & theirs)):
            share = f"{len(ours & theirs) / max(1, len(functions)):.0%}"
            files = files_of(functions)
            lines = [f"{lines_of(files):,}", f"{lines_of_functions(functions):,}"]
            rows.append([name, kind, str(len(files)), *lines, str(len(functions)), share])
    header = ("", "", "files", "lines of these files", "lines of these functions", "functions", "of them shared")
    return grid(header, rows)


def rooms(text: Steps, control: Steps) -> list[str]:
    """How many functions of each package a step with validation and checkpoint enters."""
    kinds = {"text only": text.whole - control.whole, "control only": control.whole - text.whole}
    kinds["both"] = text.whole & control.whole
    counts = {kind: Counter(room_of(file) for file, _ in functions) for kind, functions in kinds.items()}
    names = sorted(set().union(*counts.values()))
    rows = [[f"`src/tether/{room}`", *(str(counts[kind][room]) for kind in kinds)] for room in names]
    return grid(("package", *kinds), rows)


def core(functions: Functions) -> Functions:
    """The functions in `CORE`."""
    return frozenset((file, name) for file, name in functions if file.is_relative_to(PACKAGE) and room_of(file) in CORE)


def room_of(file: Path) -> str:
    """The package of a file, or the module beside the packages; of the two products the folder or module in them."""
    parts = file.relative_to(PACKAGE).parts
    return "/".join(parts[:2]) if parts[0] in ("text", "control") else parts[0]


def written(page: str, lines: list[str]) -> str:
    """The page with these lines between its marks.

    Raises:
        ValueError: the page has no such marks.
    """
    if BEGIN not in page or END not in page:
        raise ValueError(f"the page has no {BEGIN} and {END}; write them where the table goes")
    before, _, rest = page.partition(BEGIN)
    return "\n".join([before + BEGIN, *lines, END]) + rest.partition(END)[2]


def main() -> None:
    """Trace both runs and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help=f"put the tables into this page, between {BEGIN} and {END}")
    parser.add_argument("--files", action="store_true", help="also list the files of a step and their functions")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        text, control = trace_text(Path(scratch, "text")), trace_control(Path(scratch, "control"))
    lines = [*table(text, control), "", *rooms(text, control)]
    print("\n".join(lines))
    if given.files:
        for name, functions in (("text", text.plain), ("control", control.plain)):
            counts = Counter(file for file, _ in functions)
            for file, count in sorted(counts.items()):
                print(f"{name:8} {count:4} {lines_of({file}):5} {file.relative_to(ROOT)}")
    if given.write:
        given.write.write_text(written(given.write.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    main()
