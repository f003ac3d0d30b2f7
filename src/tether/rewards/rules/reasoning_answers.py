"""Answers that scorers of reasoning-gym would run, hang on, or take for right."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

BY_EVAL = frozenset(("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"))
"""Tasks whose scorers call Python's `eval` on an answer that is not the expected text: it may be a list."""
OF_NUMBERS = frozenset(("countdown", "puzzle24"))
"""Those that call SymPy's `parse_expr`, which is `eval`, too, on what shall be made of + - * / and numbers."""
BY_SYMPY = frozenset(("polynomial_multiplication", "simple_integration", "intermediate_integration"))
"""Those that call it on other expressions."""
WITHOUT_END = BY_SYMPY | {"coin_flip", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks whose scorers a short answer keeps busy for ever: ``1e999999999``, a nested formula, ``U99999999``."""
_SUM = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UAdd, ast.USub, ast.Constant)
_ARITHMETIC = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context, ast.Constant, ast.Name,
    ast.Call,
)  # fmt: skip
_FUNCTIONS = frozenset((
    "Abs", "abs", "sqrt", "cbrt", "root", "exp", "log", "ln", "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sign", "floor", "ceiling", "factorial", "erf", "gamma",
    "Rational",
))  # fmt: skip
"""Not SymPy's `Integral`, which would repeat the question."""


def may_be_scored(task: str, answer: str) -> bool:
    """Whether the task's scorer may see an answer other than the expected text; else there is none."""
    if task in BY_EVAL:
        return _is_value_or_text(answer)
    if task in OF_NUMBERS:
        return _sum(answer) is not None
    return task not in BY_SYMPY or _is_arithmetic(answer)


def is_right(task: str, answer: str, entry: Mapping[str, Any]) -> bool:
    """Whether an answer to which the task's scorer gave all points deserves them."""
    return task not in _RIGHT or _RIGHT[task](answer, entry)


def _is_the_sum(answer: str, entry: Mapping[str, Any]) -> bool:
    """Each of the row's numbers once, and exactly the target: the scorer of puzzle24 takes any four numbers, and 24.5,
    and that of countdown sees no `3_0_9`."""
    tree = _sum(answer)
    assert tree is not None  # else nobody would have scored it
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    used = [value for value in values if isinstance(value, int | float)]
    metadata = entry["metadata"]
    return sorted(used) == sorted(metadata["numbers"]) and _value(tree.body) == metadata.get("target", 24)


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(int() | float() as value):
            return Fraction(value)
        case ast.UnaryOp(op, operand):
            return -_value(operand) if isinstance(op, ast.USub) else _value(operand)
        case ast.BinOp(left, op, right):
            a, b = _value(left), _value(right)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
            return a / b
    raise AssertionError(node)


def _is_near(answer: str, entry: Mapping[str, Any]) -> bool:
    """Not only a beginning of the expected digits, as 0 is of every probability."""
    found, expected = (float(Fraction(text.replace(",", ""))) for text in (answer, entry["answer"]))
    return abs(found - expected) <= 1e-4


_RIGHT: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "coin_flip": _is_near,
    "complex_arithmetic": lambda answer, _: "nan" not in answer.lower(),  # min(1.0, nan) is 1.0
    "countdown": _is_the_sum,
    # the scorer compares bool(answer), and every text but "" is true
    "game_of_life_halting": lambda answer, entry: answer.strip().lower() == str(entry["answer"]).lower(),
    "number_sorting": lambda answer, _: "nan" not in answer.lower(),  # is farther than 1 from no number
    # words are no solution, and where there is none they are as many as expected
    "polynomial_equations": lambda answer, entry: bool(entry["answer"]) or not any(map(str.isalnum, answer)),
    "puzzle24": _is_the_sum,
}


def _is_value_or_text(answer: str) -> bool:
    """Whether evaluating an answer gives a list or another plain value, or fails before anything is run."""
    try:
        ast.literal_eval(answer)
    except SyntaxError:
        return True
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _tree(answer: str) -> ast.Expression | None:
    try:
        return ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _sum(answer: str) -> ast.Expression | None:
    """An answer that is made of + - * / and numbers without letters: no `0x10`, no `1e999999999`."""
    tree = None if any(map(str.isalpha, answer)) else _tree(answer)
    made_of = tree is not None and all(
        isinstance(node, _SUM) and (not isinstance(node, ast.Constant) or isinstance(node.value, int | float))
        for node in ast.walk(tree)
    )
    return tree if made_of else None


def _is_arithmetic(answer: str) -> bool:
    """Whether an answer is made of numbers, names, operators and functions of numbers: no text, attribute or item."""
    tree = _tree(answer)
    return tree is not None and all(
        isinstance(node, _ARITHMETIC)
        and not (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        and not (isinstance(node, ast.Call) and (node.keywords or not _is_function(node.func)))
        for node in ast.walk(tree)
    )


def _is_function(called: ast.expr) -> bool:
    return isinstance(called, ast.Name) and called.id in _FUNCTIONS
