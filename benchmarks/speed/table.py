"""The result of a measurement, and its markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import fill

WIDTH = 118


@dataclass(frozen=True)
class Goal:
    """A number that is to be reached, and what was measured."""

    what: str
    measured: float
    bound: float
    at_most: bool = False
    """Smaller is better."""
    form: str = "{:.2f}"
    """How both numbers are written."""

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound

    def row(self) -> list[str]:
        """Cells of the table of goals."""
        sign = "at most" if self.at_most else "at least"
        bound, measured = self.form.format(self.bound), self.form.format(self.measured)
        return [self.what, f"{sign} {bound}", measured, "met" if self.met else "**not met**"]


@dataclass(frozen=True)
class Section:
    """One table."""

    title: str
    about: Sequence[str]
    """Sentences before it, broken anywhere."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    goals: Sequence[Goal] = ()
    after: Sequence[str] = field(default_factory=tuple)
    """Lines of markdown behind it."""

    def markdown(self) -> str:
        """The section under a heading of the second level."""
        lines = [f"## {self.title}", "", wrapped(self.about), "", *grid(self.columns, self.rows)]
        if self.goals:
            lines += ["", *grid(("goal", "", "measured", ""), [goal.row() for goal in self.goals])]
        return "\n".join([*lines, *(["", *self.after] if self.after else [])]) + "\n"


def wrapped(words: Sequence[str]) -> str:
    """One paragraph in lines of a readable length."""
    return fill(" ".join(word for word in words if word), WIDTH, break_long_words=False, break_on_hyphens=False)


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a markdown table."""
    head = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return head + ["| " + " | ".join(row) + " |" for row in rows]
