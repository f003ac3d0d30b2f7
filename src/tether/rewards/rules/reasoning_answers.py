"""Checks for answers that scorers of reasoning-gym would execute, hang on, or wrongly accept."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

EVALUATED_TASKS = frozenset(("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"))
"""Tasks whose scorers call Python's `eval` on an answer that differs from the expected text; it may be a list."""
NUMBER_TASKS = frozenset(("countdown", "puzzle24"))
"""Tasks whose scorers call SymPy's `parse_expr`, which calls `eval`, on sums and products of numbers."""
EXPRESSION_TASKS = frozenset(("polynomial_multiplication", "simple_integration", "intermediate_integration"))
"""Tasks whose scorers call SymPy's `parse_expr` on other expressions."""
UNBOUNDED_TASKS = EXPRESSION_TASKS | {"coin_flip", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks whose scorers do not end for some short answers: ``1e999999999``, a nested formula, ``U99999999``."""
_ARITHMETIC = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UAdd, ast.USub, ast.Constant,
)  # fmt: skip
_EXPRESSION = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context, ast.Constant, ast.Name,
    ast.Call,
)  # fmt: skip
_FUNCTIONS = frozenset((
    "Abs", "abs", "sqrt", "cbrt", "root", "exp", "log", "ln", "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sign", "floor", "ceiling", "factorial", "erf", "gamma",
    "Rational",
))  # fmt: skip
"""Functions that an answer may call. SymPy's `Integral` is not among them, because it would repeat the question."""


def may_be_scored(task: str, answer: str) -> bool:
    """Return whether an answer other than the expected text may be passed to the task's scorer."""
    if task in EVALUATED_TASKS:
        return _is_value_or_text(answer)
    if task in NUMBER_TASKS:
        return _parse_arithmetic(answer) is not None
    return task not in EXPRESSION_TASKS or _is_expression(answer)


def is_right(task: str, answer: str, entry: Mapping[str, Any]) -> bool:
    """Return whether an answer that the task's scorer accepts is really right."""
    return task not in _CHECKS or _CHECKS[task](answer, entry)


def _reaches_target(answer: str, entry: Mapping[str, Any]) -> bool:
    """Return whether an expression uses each of the row's numbers once and equals the target exactly."""
    # The scorer of puzzle24 accepts any four numbers, and 24.5; the one of countdown ignores `3_0_9`.
    tree = _parse_arithmetic(answer)
    assert tree is not None  # otherwise the scorer would not have been called
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
    """Return whether a number is near the expected one. The scorer accepts any prefix of its digits, such as 0."""
    number, expected = (float(Fraction(text.replace(",", ""))) for text in (answer, entry["answer"]))
    return abs(number - expected) <= 1e-4


_CHECKS: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "coin_flip": _is_near,
    "complex_arithmetic": lambda answer, _: "nan" not in answer.lower(),  # min(1.0, nan) is 1.0
    "countdown": _reaches_target,
    # the scorer compares bool(answer), and every text except "" is true
    "game_of_life_halting": lambda answer, entry: answer.strip().lower() == str(entry["answer"]).lower(),
    "number_sorting": lambda answer, _: "nan" not in answer.lower(),  # abs(nan - x) > 1 is False for every x
    # the scorer ignores words, so that they pass if no solution is expected
    "polynomial_equations": lambda answer, entry: bool(entry["answer"]) or not any(map(str.isalnum, answer)),
    "puzzle24": _reaches_target,
}


def _is_value_or_text(answer: str) -> bool:
    """Return whether `eval` of an answer returns a plain value such as a list, or fails before it executes anything."""
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


def _parse_arithmetic(answer: str) -> ast.Expression | None:
    """Parse an expression of + - * / and numbers without letters (no `0x10` or `1e999999999`); None for other text."""
    tree = None if any(map(str.isalpha, answer)) else _tree(answer)
    is_valid = tree is not None and all(
        isinstance(node, _ARITHMETIC) and (not isinstance(node, ast.Constant) or isinstance(node.value, int | float))
        for node in ast.walk(tree)
    )
    return tree if is_valid else None


def _is_expression(answer: str) -> bool:
    """Return whether an answer consists of numbers, names, operators and `_FUNCTIONS`."""
    tree = _tree(answer)
    return tree is not None and all(
        isinstance(node, _EXPRESSION)
        and not (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        and not (isinstance(node, ast.Call) and (node.keywords or not _is_function(node.func)))
        for node in ast.walk(tree)
    )


def _is_function(called: ast.expr) -> bool:
    return isinstance(called, ast.Name) and called.id in _FUNCTIONS
