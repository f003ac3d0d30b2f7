"""A calculator: the four operations and brackets, and nothing that a model could do harm with."""

import ast
import operator

OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


class Calculator:
    """Computes what the model writes down."""

    def __init__(self, digits: int = 6) -> None:
        """Round results to so many digits behind the point."""
        self.digits = digits

    def call(self, expression: str) -> str:
        """The value of an expression; whatever it raises is told to the model."""
        value = self.value(ast.parse(expression.replace(",", ""), mode="eval").body)
        if not isinstance(value, float):
            return str(value)
        rounded = round(value, self.digits)
        return str(int(rounded)) if rounded.is_integer() else repr(rounded)

    def value(self, node: ast.expr) -> float:
        """The value of a part of it."""
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
                return OPERATIONS[type(operation)](self.value(left), self.value(right))
            case ast.UnaryOp(operation, operand) if type(operation) in OPERATIONS:
                return OPERATIONS[type(operation)](self.value(operand))
        raise ValueError("only numbers, + - * / // % and brackets")
