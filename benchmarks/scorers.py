"""Do tether's rules score as verl's scorers do? Rows, replies of known kinds, both side by side.

    pip install --no-deps --target oracle verl==0.9.1 mathruler pylatexenc
    PYTHONPATH=oracle python -m benchmarks.scorers --data DATA --write docs/evidence/scorers.md

DATA has gsm8k/test.parquet and math/test.parquet in verl's row layout (`tether data pull`). Each reply is scored by the
rule that tether has for its data_source, and by verl's `default_compute_score`. verl runs programs without a sandbox:
those here are harmless.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.resumable import write_between
from benchmarks.scored_rows import PROBLEMS, QUESTIONS, program_replies, search_replies
from tether.text.rewards.router import find_reward
from tether.text.rewards.sandbox import ProgramOptions
from tether.types import JsonObject

BEGIN, END = "<!-- scorers:begin -->", "<!-- scorers:end -->"
ROWS = 500
"""Of a data set, drawn at random."""

Replies = Callable[[JsonObject, Any, Any], Mapping[str, str]]
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


def numina_replies(row: JsonObject, truth: str, other: str) -> dict[str, str]:
    """Replies to a problem of NuminaMath, boxed or in a sentence."""
    chosen = ("boxed truth", "with spaces", "in dollars", "truth, then another's", "another row's", "cut", "nothing")
    return {kind: reply for kind, reply in boxed_replies(row, truth, other).items() if kind in chosen} | {
        "The answer is truth.": f"So it is. The answer is ${truth}$.",
        "Answer: truth": f"So it is.\nAnswer: {truth}",
    }


def geo3k_replies(row: JsonObject, truth: str, other: str) -> dict[str, str]:
    """Replies to a problem of Geometry3K, with and without a thought before the box."""
    return {
        "thought, boxed truth": f"<think>So it is.</think>\n\\boxed{{{truth}}}",
        "boxed truth": f"So it is \\boxed{{{truth}}}.",
        "thought, another row's": f"<think>So it is.</think> \\boxed{{{other}}}",
        "thought after the box": f"\\boxed{{{truth}}} <think>So it is.</think>",
        "thought alone": "<think>So it is.</think>",
        "truth without a box": f"The answer is {truth}.",
        "nothing": "",
    }


@dataclass(frozen=True)
class Case:
    """Rows that one rule scores."""

    data_source: str
    rows: str | Sequence[JsonObject]
    """The rows, or the folder that has them."""
    replies: Replies

    def chosen(self, data: Path) -> Sequence[JsonObject]:
        """Its rows; of many some."""
        if not isinstance(self.rows, str):
            return self.rows
        rows = pq.read_table(data / self.rows / "test.parquet").to_pylist()
        return random.Random(1).sample(rows, min(ROWS, len(rows)))


CASES = {
    "GSM8K": Case("openai/gsm8k", "gsm8k", gsm8k_replies),
    "MATH": Case("DigitalLearningGmbH/MATH-lighteval", "math", boxed_replies),
    "DAPO, ground truths of MATH": Case("math_dapo", "math", dapo_replies),
    "NuminaMath, ground truths of MATH": Case("numina_olympiads", "math", numina_replies),
    "Geometry3K, ground truths of MATH": Case("hiyouga/geometry3k", "math", geo3k_replies),
    "Search-R1": Case("searchR1_nq", QUESTIONS, search_replies),
    "programs": Case("apps", PROBLEMS, program_replies),
}


def verls() -> Callable[..., Any]:
    """The scorer of verl that takes any data_source.

    Raises:
        SystemExit: verl is not installed.
    """
    try:
        module = importlib.import_module("verl.utils.reward_score")
    except ImportError as error:
        raise SystemExit(f"{error}: see the first lines of {__file__}") from error
    score: Callable[..., Any] = module.default_compute_score
    return score


def number(result: Any) -> float:
    """The score in a result."""
    return float(result["score"] if isinstance(result, Mapping) else result)


def compared(data: Path, case: Case) -> Iterator[tuple[str, object, object, float, float]]:
    """Kind of reply, ground truth, the other's, tether's score and verl's, for each reply to each row."""
    rows, source = case.chosen(data), case.data_source
    rule, theirs = find_reward(source, ProgramOptions()), verls()
    for row, another in zip(rows, [*rows[1:], rows[0]], strict=True):
        truth, other = row["reward_model"]["ground_truth"], another["reward_model"]["ground_truth"]
        for kind, reply in case.replies(row, truth, other).items():
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # verl prints some replies
                pair = [number(rule(source, reply, truth, {})), number(theirs(source, reply, truth))]
            yield kind, truth, other, *pair


def lines_of(data: Path, name: str) -> list[str]:
    """Table rows: all kinds on which both agree in one, each other kind by itself, with an example."""
    found = list(compared(data, CASES[name]))
    kinds = list(dict.fromkeys(kind for kind, *_ in found))
    by_kind = {kind: [entry for entry in found if entry[0] == kind] for kind in kinds}
    apart = {kind: [entry for entry in entries if entry[3] != entry[4]] for kind, entries in by_kind.items()}
    same = [kind for kind in kinds if not apart[kind]]
    count = sum(len(by_kind[kind]) for kind in same)
    lines = [f"| {name} | {', '.join(same)} | {count:,} | {count:,} | |"] if same else []
    for kind in kinds:
        if apart[kind]:
            _, truth, other, ours, theirs = apart[kind][0]
            shown = f"truth `{truth:.60}`, other `{other:.60}`: " if isinstance(truth, str) else ""
            shown = f"{' '.join(shown.split())} tether {ours:.3g}, verl {theirs:.3g}".strip().replace("|", "\\|")
            total = len(by_kind[kind])
            lines.append(f"| {name} | {kind} | {total:,} | {total - len(apart[kind]):,} | {shown} |")
    return lines


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k and math")
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES), help="some of them")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    arguments = parser.parse_args()
    lines = ["| rule | reply | replies | equal | first that is not |", "|---|---|---|---|---|"]
    for name in arguments.case:
        lines += lines_of(arguments.data, name)
    print(*lines, sep="\n")
    if arguments.write:
        write_between(arguments.write, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    main()
