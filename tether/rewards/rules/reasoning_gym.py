"""Procedural tasks of reasoning-gym: each task brings its own scorer, which is rebuilt from the row."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset

from tether.rewards.rules.bounded import TooMuch, bounded
from tether.rewards.rules.extract import answer_tag, first_word, last_number
from tether.types import ExtraInfo


def _whole_reply(text: str) -> str:
    return text.strip()


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "last_number": last_number,
    "answer_tag": answer_tag,
    "first_word": first_word,
    "full": _whole_reply,
}

BY_EVAL = frozenset(("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"))
"""Tasks whose scorers call Python's `eval` on an answer that is not the expected text: it may be a list."""
BY_SYMPY = frozenset(
    ("countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration")
)
"""Tasks whose scorers call SymPy's `parse_expr` on an answer, which is `eval`, too."""
_NOTHING = ""  # an answer that no scorer evaluates
_ARITHMETIC = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context, ast.Constant, ast.Name,
    ast.Call,
)  # fmt: skip
_FUNCTIONS = frozenset((
    "Abs", "abs", "sqrt", "cbrt", "root", "exp", "log", "ln", "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sign", "floor", "ceiling", "factorial", "erf", "gamma",
    "Rational", "Integral",
))  # fmt: skip


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: ExtraInfo) -> float:
    """Score the answer found in the reply with the task's own scorer; 0.0 without an answer.

    `extra_info["reasoning_gym"]` holds "task", "params" (of the dataset), "entry" (question, answer, metadata) and
    "extract" (a key of `EXTRACTORS`).

    Most scorers give part of the points to a text that contains the answer. A number is no such text (13 would earn
    half the points of 3), so a last number is right, 1.0, or wrong, 0.0, and so is a first word.

    Some scorers evaluate an answer as Python: one that is more than a value, or an arithmetic expression, is scored as
    no answer, and so is an expression that takes too long.

    Raises:
        ValueError: an unknown "extract" or task.
    """
    row = extra_info["reasoning_gym"]
    if row["extract"] not in EXTRACTORS:
        known = ", ".join(EXTRACTORS)
        raise ValueError(f"extra_info.reasoning_gym.extract is {row['extract']!r}; choose one of {known}")
    answer = EXTRACTORS[row["extract"]](solution_str)
    if answer is None:
        return 0.0
    dataset = _dataset(row["task"], json.dumps(row["params"], sort_keys=True))
    task = row["entry"]["metadata"]["source_dataset"] if row["task"] == "composite" else row["task"]
    points = _points(dataset, task, answer, row["entry"])
    return float(points >= 1.0) if row["extract"] in ("last_number", "first_word") else points


@lru_cache(maxsize=256)
def _dataset(task: str, params: str) -> ProceduralDataset:
    """The dataset that knows the scorer; it generates nothing, so its size and seed do not matter."""
    return reasoning_gym.create_dataset(task, **{**json.loads(params), "size": 1, "seed": 0})


def _points(dataset: ProceduralDataset, task: str, answer: str, entry: Any) -> float:
    if task in BY_EVAL and answer != entry["answer"] and not _is_value_or_text(answer):
        answer = _NOTHING
    if task not in BY_SYMPY:
        return float(dataset.score_answer(answer, entry))
    try:
        return float(bounded(dataset.score_answer, answer if _is_arithmetic(answer) else _NOTHING, entry))
    except TooMuch:
        return float(dataset.score_answer(_NOTHING, entry))


def _is_value_or_text(answer: str) -> bool:
    """Whether evaluating an answer gives a list or another plain value, or fails before anything is run."""
    try:
        ast.literal_eval(answer)
    except SyntaxError:
        return True
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _is_arithmetic(answer: str) -> bool:
    """Whether an answer is made of numbers, names, operators and functions of numbers: no text, attribute or item."""
    try:
        nodes = list(ast.walk(ast.parse(answer.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(
        isinstance(node, _ARITHMETIC)
        and not (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        and not (isinstance(node, ast.Call) and (node.keywords or not _is_function(node.func)))
        for node in nodes
    )


def _is_function(called: ast.expr) -> bool:
    return isinstance(called, ast.Name) and called.id in _FUNCTIONS
