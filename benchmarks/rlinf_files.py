"""How many of RLinf's configuration files import whole, and which keys are refused, unknown or wrong in the others?

    git clone https://github.com/RLinf/RLinf
    EMBODIED_PATH=RLinf/examples/embodiment REPO_PATH=RLinf python -m benchmarks.rlinf_files RLinf/examples

Each file of a run (one with a section `runner`) is imported as `tether config import-rlinf` does it. The two variables
are those that RLinf's own scripts set, for its files refer to them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from benchmarks.speed.table import grid
from tether.config import ConfigError
from tether.config.loading.rlinf_marks import is_rlinf
from tether.config.loading.yaml_file import read_yaml
from tether.config.problems import Problem
from tether.integrations.rlinf.importer import TASK_KEY, import_file

Outcome = Literal["whole", "refused by name", "another kind of run", "contradictory or incomplete", "unknown keys"]
PPO = "gae"


@dataclass(frozen=True)
class File:
    """The outcome for one file."""

    path: Path
    outcome: Outcome
    estimator: str
    """`algorithm.adv_type`, or empty."""
    blamed: tuple[Problem, ...]
    """Keys that are refused, unknown or wrong."""


def import_one(path: Path) -> File | None:
    """Import a file; None if it is no run of RLinf's, but a preset or something else."""
    try:
        tree = read_yaml(path)
    except ConfigError:
        return None
    if not is_rlinf(tree) or "runner" not in tree:
        return None
    algorithm = tree.get("algorithm")
    estimator = str(algorithm.get("adv_type", "")) if isinstance(algorithm, dict) else ""
    try:
        imported = import_file(path, [])
    except ConfigError as error:
        return File(path, "contradictory or incomplete", estimator, tuple(error.problems))
    unknown = [problem for problem in imported.problems if "unknown key" in problem.what]
    kind = [problem for problem in imported.problems if problem.path == TASK_KEY]
    refused = imported.refusals()
    outcomes: Sequence[tuple[Outcome, Sequence[Problem]]] = (
        ("another kind of run", kind),
        ("unknown keys", unknown),
        ("contradictory or incomplete", imported.problems),
        ("refused by name", refused),
    )
    outcome, blamed = next(((name, found) for name, found in outcomes if found), ("whole", ()))
    return File(path, outcome, estimator, tuple(blamed))


def import_all(folder: Path) -> list[File]:
    """Import every file of a run below a folder.

    Raises:
        ValueError: there is none.
    """
    files = [file for path in sorted(folder.rglob("*.yaml")) if (file := import_one(path)) is not None]
    if not files:
        raise ValueError(f"{folder}: no file of RLinf's with a section runner is below it. Name RLinf's examples")
    return files


def counts(files: Sequence[File]) -> list[str]:
    """A table: outcome, files of all kinds, files of PPO."""
    everywhere = Counter(file.outcome for file in files)
    ppo = Counter(file.outcome for file in files if file.estimator == PPO)
    rows = [[name, str(everywhere[name]), str(ppo[name])] for name in get_args(Outcome)]
    return grid(("", "files", "of PPO"), [*rows, ["all", str(len(files)), str(ppo.total())]])


def reasons(files: Iterable[File]) -> list[str]:
    """A table: each key in the way of a run, the files that it stops and stops alone, and why, most frequent first.

    The keys of `env.train` and `env.eval` of one name are one.
    """
    found: dict[str, list[Problem]] = {}
    alone = Counter[str]()
    for file in files:
        blamed = {problem.path.replace("env.eval.", "env.train."): problem for problem in file.blamed}
        alone.update(list(blamed) if len(blamed) == 1 else [])
        for path, problem in blamed.items():
            found.setdefault(path, []).append(problem)
    rows = [
        [f"`{path}`", str(len(problems)), str(alone[path]), _short(problems[0])]
        for path, problems in sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return grid(("key", "files", "alone", "why (of the first)"), rows)


def _short(problem: Problem) -> str:
    return problem.what.replace("|", "\\|")


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="RLinf's examples")
    parser.add_argument("--list", action="store_true", help="also print each file with its outcome")
    parser.add_argument("--ppo", action="store_true", help="list files and reasons of PPO only")
    given = parser.parse_args()
    files = import_all(given.folder)
    shown = [file for file in files if file.estimator == PPO or not given.ppo]
    if given.list:
        print("\n".join(f"{file.outcome}: {file.path.relative_to(given.folder)}" for file in shown), end="\n\n")
    print("\n".join([*counts(files), "", *reasons(shown)]))


if __name__ == "__main__":
    main()
