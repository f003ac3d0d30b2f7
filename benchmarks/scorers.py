"""Do tether's rules score as verl's scorers do? Real rows, replies of known kinds, both side by side.

    pip download --no-deps verl==0.9.1 --dest wheels
    python -m benchmarks.scorers --verl wheels/verl-0.9.1-py3-none-any.whl --data DATA --write docs/scorers.md

DATA has gsm8k/test.parquet and math/test.parquet in verl's row layout (`tether data pull`). verl's files are loaded one
by one, without the rest of verl.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.resumable import write_between
from tether.rewards.rules.gsm8k import strict
from tether.rewards.rules.math import boxed, dapo
from tether.types import JsonObject

BEGIN, END = "<!-- scorers:begin -->", "<!-- scorers:end -->"
SCORERS = "verl/utils/reward_score"
ROWS = 500
"""Of each kind, drawn at random."""

Replies = Callable[[JsonObject, str, str], Mapping[str, str]]
"""(row, its ground truth, that of another row) -> kind -> reply."""


def gsm8k_replies(row: JsonObject, truth: str, other: str) -> dict[str, str]:
    """Replies to a question of GSM8K."""
    return {
        "worked solution": row["extra_info"]["answer"],
        "#### truth": f"So it is.\n#### {truth}",
        "#### $truth": f"#### ${truth}",
        "#### truth, a unit": f"#### {truth} apples",
        "#### truth.": f"#### {truth}.",
        "truth without ####": f"The answer is {truth}.",
        "another's, then truth": f"#### {other}\nNo.\n#### {truth}",
        "another row's": f"#### {other}",
        "half of it": row["extra_info"]["answer"][: len(row["extra_info"]["answer"]) // 2],
        "nothing": "",
    }


def boxed_replies(row: JsonObject, truth: str, other: str) -> dict[str, str]:
    """Replies to a problem of MATH."""
    return {
        "boxed truth": f"So it is $\\boxed{{{truth}}}$.",
        "with spaces": f"$\\boxed{{ {truth} }}$",
        "in dollars": f"\\boxed{{${truth}$}}",
        "truth without a box": f"The answer is ${truth}$.",
        "another's, then truth": f"$\\boxed{{{other}}}$, no: $\\boxed{{{truth}}}$",
        "truth, then another's": f"$\\boxed{{{truth}}}$, no: $\\boxed{{{other}}}$",
        "another row's": f"$\\boxed{{{other}}}$",
        "cut": f"So it is $\\boxed{{{truth}",
        "nothing": "",
    }


def dapo_replies(row: JsonObject, truth: str, other: str) -> dict[str, str]:
    """Replies in the layout of DAPO."""
    return {
        "Answer: truth": f"So it is.\nAnswer: {truth}",
        "in dollars": f"Answer: ${truth}$",
        "boxed truth": f"$\\boxed{{{truth}}}$",
        "another's, then truth": f"Answer: {other}\nAnswer: {truth}",
        "another row's": f"Answer: {other}",
        "nothing": "",
    }


CASES: Mapping[str, tuple[str, str, Callable[..., Any], Replies]] = {
    "GSM8K": ("gsm8k", "gsm8k", strict, gsm8k_replies),
    "MATH": ("math", "math_reward", boxed, boxed_replies),
    "DAPO, ground truths of MATH": ("math", "math_dapo", dapo, dapo_replies),
}
"""Name -> folder of rows, verl's file, tether's rule, replies."""


def verls(wheel: Path, name: str) -> Callable[[str, str], Any]:
    """A scorer of verl, out of its wheel."""
    with tempfile.TemporaryDirectory() as folder:
        path = zipfile.ZipFile(wheel).extract(f"{SCORERS}/{name}.py", folder)
        spec = importlib.util.spec_from_file_location(f"verl_{name}", path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    score: Callable[[str, str], Any] = module.compute_score
    return score


def number(result: Any) -> float:
    """The score in a result."""
    return float(result["score"] if isinstance(result, Mapping) else result)


def compared(data: Path, wheel: Path, case: str) -> Iterator[tuple[str, str, str, float, float]]:
    """Kind of reply, ground truth, the other's, tether's score and verl's, for each reply to each row."""
    folder, file, rule, replies = CASES[case]
    rows = pq.read_table(data / folder / "test.parquet").to_pylist()
    chosen, theirs = random.Random(1).sample(rows, min(ROWS, len(rows))), verls(wheel, file)
    for row, another in zip(chosen, [*chosen[1:], chosen[0]], strict=True):
        truth, other = row["reward_model"]["ground_truth"], another["reward_model"]["ground_truth"]
        for kind, reply in replies(row, truth, other).items():
            ours = number(rule(row["data_source"], reply, truth, {}))
            yield kind, truth, other, ours, number(theirs(reply, truth))


def lines_of(data: Path, wheel: Path, case: str) -> list[str]:
    """Table rows: all kinds on which both agree in one, each other kind by itself, with an example."""
    found = list(compared(data, wheel, case))
    kinds = list(dict.fromkeys(kind for kind, *_ in found))
    apart = {kind: [entry for entry in found if entry[0] == kind and entry[3] != entry[4]] for kind in kinds}
    same = [kind for kind in kinds if not apart[kind]]
    count = len(found) // len(kinds)
    lines = [f"| {case} | {', '.join(same)} | {count * len(same):,} | {count * len(same):,} | |"] if same else []
    for kind in kinds:
        if apart[kind]:
            _, truth, other, ours, theirs = apart[kind][0]
            shown = f"truth `{truth}`, other `{other}`: tether {ours:g}, verl {theirs:g}".replace("|", "\\|")
            lines.append(f"| {case} | {kind} | {count:,} | {count - len(apart[kind]):,} | {shown} |")
    return lines


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, required=True, help="wheel of verl")
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k and math")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    arguments = parser.parse_args()
    lines = ["| rule | reply | replies | equal | first that is not |", "|---|---|---|---|---|"]
    for case in CASES:
        lines += lines_of(arguments.data, arguments.verl, case)
    print(*lines, sep="\n")
    if arguments.write:
        write_between(arguments.write, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    main()
