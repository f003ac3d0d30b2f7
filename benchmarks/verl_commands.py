"""How many of the commands in verl's scripts resolve here, and why is each of the others refused?

    python -m benchmarks.verl_commands ../shared/data/verl_commands --write docs/guides/coming-from-verl.md

The folder holds a file of JSON lines for each tree of verl: the `script` and the `args` of each call of `main_ppo`,
which was recorded instead of run. A call resolves if `tether config check --no-files` accepts it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.resumable import write_between
from benchmarks.speed.table import grid
from tether.config import ConfigError, load_config
from tether.config.problems import Problem

BEGIN, END = "<!-- commands:begin -->", "<!-- commands:end -->"
OF_PICTURES = ("data.image_key=", "data.video_key=")


@dataclass(frozen=True)
class Call:
    """A recorded call, and what keeps it from being run here."""

    script: str
    asks_for_pictures: bool
    problems: tuple[Problem, ...]


def check(script: str, args: Sequence[str]) -> Call:
    """Load the configuration of a call, whose files need not exist."""
    options = argparse.ArgumentParser(allow_abbrev=False)
    options.add_argument("--config-path", type=Path, default=Path())
    options.add_argument("--config-name")
    given, overrides = options.parse_known_args(args)
    name = given.config_name and str(given.config_name).removesuffix(".yaml")
    asks_for_pictures = any(word.lstrip("+").startswith(OF_PICTURES) for word in overrides)
    try:
        load_config(given.config_path / f"{name}.yaml" if name else None, overrides)
    except ConfigError as error:
        return Call(script, asks_for_pictures, tuple(error.problems))
    return Call(script, asks_for_pictures, ())


def check_all(folder: Path) -> dict[str, list[Call]]:
    """Check the calls of each tree, by the name of its file without `commands_`.

    Raises:
        ValueError: the folder has no such file.
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise ValueError(f"{folder}: no .jsonl is in it. Name the folder of recorded calls")
    lines = {file: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files}
    return {
        file.stem.removeprefix("commands_"): [check(line["script"], line["args"]) for line in lines[file]]
        for file in files
    }


def counts(trees: Mapping[str, Sequence[Call]]) -> list[str]:
    """A table: tree, calls, those that resolve, and how many of these train on images or videos, whose rows are
    refused."""
    rows = []
    for tree, calls in trees.items():
        sound = [call for call in calls if not call.problems]
        rows.append([tree, *map(str, (len(calls), len(sound), sum(call.asks_for_pictures for call in sound)))])
    return grid(("verl", "calls", "resolve", "of these on images"), rows)


def reasons(trees: Mapping[str, Sequence[Call]]) -> list[str]:
    """A table: the first key in the way of each other call, how many it stops in each tree, and why."""
    why: dict[str, str] = {}
    stopped: dict[str, Counter[str]] = {}
    for tree, calls in trees.items():
        for problem in (call.problems[0] for call in calls if call.problems):
            key = "--config-name" if problem.path.endswith(".yaml") else problem.path.partition("=")[0]
            why.setdefault(key, problem.what.replace("|", "\\|"))
            stopped.setdefault(key, Counter())[tree] += 1
    rows = [
        [key, *(str(stopped[key][tree]) for tree in trees), why[key]]
        for key in sorted(stopped, key=lambda key: (-stopped[key].total(), key))
    ]
    return grid(("key", *trees, "why (of the first)"), rows)


def _listing(calls: Iterable[Call]) -> list[str]:
    return [
        "\n".join([call.script, *(f"    {problem}" for problem in call.problems)]) for call in calls if call.problems
    ]


def main() -> None:
    """Count, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the recorded calls")
    parser.add_argument("--list", action="store_true", help="also print all problems of each refused call")
    parser.add_argument("--write", type=Path, help="a page whose tables are replaced")
    given = parser.parse_args()
    trees = check_all(given.folder)
    if given.list:
        print("\n".join(line for calls in trees.values() for line in _listing(calls)), end="\n\n")
    tables = "\n".join([*counts(trees), "", *reasons(trees)])
    print(tables)
    if given.write:
        write_between(given.write, BEGIN, END, f"\n{tables}")  # the mark ends a paragraph


if __name__ == "__main__":
    main()
