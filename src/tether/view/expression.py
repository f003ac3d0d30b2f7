"""Filters such as ``reward == 0 and length > 200`` over the columns of samples."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from tether.observations import Array
from tether.spelling import did_you_mean

Operation = Callable[[Array, Array], Array]
COMPARISONS: Mapping[type[ast.cmpop], Operation] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
ARITHMETIC: Mapping[type[ast.operator], Operation] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
FUNCTIONS = {"abs": np.abs, "isnan": np.isnan}


def matching(expression: str, columns: Mapping[str, Array], rows: int) -> NDArray[np.bool_]:
    """Return the rows for which an expression is true.

    It may compare columns and numbers (columns such as ``part/acc`` are written unquoted), with ``and``, ``or``,
    ``not``, arithmetic, abs and isnan; nothing else is evaluated.

    Raises:
        ValueError: the expression is invalid, or names a column that does not exist.
    """
    names = {name.replace("/", "__"): column for name, column in columns.items()}
    written = expression
    for name in sorted(columns, key=len, reverse=True):
        if "/" in name:
            written = written.replace(name, name.replace("/", "__"))
    try:
        tree = ast.parse(written.strip(), mode="eval")
        with np.errstate(all="ignore"):
            result = _value(tree.body, names)
    except SyntaxError as error:
        raise ValueError(f"filter {expression!r}: {error.msg}; write for example reward==0 and length>200") from None
    return np.broadcast_to(np.asarray(result, dtype=bool), rows)


def _value(node: ast.expr, names: Mapping[str, Array]) -> Array:
    match node:
        case ast.BoolOp(op=op, values=values):
            combine = np.logical_and if isinstance(op, ast.And) else np.logical_or
            result = _value(values[0], names)
            for value in values[1:]:
                result = combine(result, _value(value, names))
            return result
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return np.logical_not(_value(operand, names))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            return ARITHMETIC[type(op)](_value(left, names), _value(right, names))
        case ast.Compare(left=left, ops=ops, comparators=others):
            result, before = np.asarray(True), _value(left, names)
            for comparison, other in zip(ops, others, strict=True):
                if type(comparison) not in COMPARISONS:
                    break
                after = _value(other, names)
                result, before = np.logical_and(result, COMPARISONS[type(comparison)](before, after)), after
            else:
                return result
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](_value(argument, names))
        case ast.Constant(value=bool() | int() | float() as value):
            return np.asarray(value)
        case ast.Name(id="true" | "false" as name):
            return np.asarray(name == "true")
        case ast.Name(id=name):
            if name in names:
                return names[name]
            column_names = [one.replace("__", "/") for one in names]
            raise ValueError(
                f"filter: no column {name!r}.{did_you_mean(name, column_names)} Columns: {', '.join(column_names)}"
            )
    raise ValueError(
        f"filter: {ast.unparse(node)} is not understood; compare columns and numbers with and, or, not, + - * / and abs"
    )
