"""Problems of a configuration: all of them at once, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; reads as `path: what is wrong. what to do`."""

    path: str
    """Dotted key, or the override or file where no key is to blame."""
    what: str
    """The fault, with the value."""
    fix: str
    """The fix."""

    def __str__(self) -> str:
        stop = "" if self.what.endswith(("?", ".")) else "."
        return f"{self.path}: {self.what}{stop} {self.fix}".rstrip()


class ConfigError(ValueError):
    """Everything that is wrong with a configuration.

    Attributes:
        problems: in the order in which they were found, never empty.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)
