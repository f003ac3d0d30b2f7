"""Arithmetic of bash: ``$((...))`` of whole numbers, and the names that ``((...))`` assigns to."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

NAME = r"[A-Za-z_]\w*"
"""Of a variable."""
_NUMBER = re.compile(r"0|-?[1-9]\d*")
_LIMIT = 1 << 63
_ASSIGNED = re.compile(rf"({NAME})(?:\[[^]]*\])?\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*({NAME})")


def _places(right: int) -> int:
    """Of a shift; ValueError: so many that bash's 64 bits come into play."""
    if not 0 <= right < 64:
        raise ValueError(f"a shift by {right}")
    return right


_WHOLE = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: math.trunc(Fraction(left, right)),  # towards zero, as bash does
    ast.Mod: lambda left, right: left - right * math.trunc(Fraction(left, right)),
    ast.LShift: lambda left, right: left << _places(right), ast.RShift: lambda left, right: left >> _places(right),
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip


def whole_number(text: str, variables: Mapping[str, Sequence[str]]) -> int | None:
    """The value of the inside of ``$((...))``; None where a variable is unknown, or it is no sum of whole numbers."""
    if "#" in text or assigned_names(text):  # another base, or what changes a variable
        return None

    def number(name: re.Match[str]) -> str:
        values = variables.get(name[1] or name[2], ())
        return values[0] if values and _NUMBER.fullmatch(values[0]) else "?"

    digits = re.sub(rf"\$?({NAME})|\$\{{({NAME})\}}", number, text)
    try:
        value = _whole(ast.parse(digits.replace("/", "//").strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return value if -_LIMIT <= value < _LIMIT else None


def assigned_names(text: str) -> list[str]:
    """The variables that an arithmetic expression sets."""
    return [name[1] or name[2] for name in _ASSIGNED.finditer(text)]


def _whole(node: ast.expr) -> int:
    """The value of an expression of whole numbers.

    Raises:
        ValueError: it is something else.
    """
    match node:
        case ast.Constant(value=int(value)) if type(value) is int:
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return -_whole(operand) if isinstance(node.op, ast.USub) else _whole(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _WHOLE:
            return int(_WHOLE[type(sign)](_whole(left), _whole(right)))
    raise ValueError(ast.dump(node))
