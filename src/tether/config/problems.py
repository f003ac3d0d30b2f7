"""Problems of a configuration, which are reported together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A problem, printed as `path: what is wrong. how to fix it`."""

    path: str
    """Dotted key, or the override or file if the problem has no key."""
    what: str
    """What is wrong, including the value."""
    fix: str
    """How to fix it."""

    def __str__(self) -> str:
        stop = "" if self.what.endswith(("?", ".")) else "."
        return f"{self.path}: {self.what}{stop} {self.fix}".rstrip()


class ConfigError(ValueError):
    """Raised with all problems of a configuration.

    Attributes:
        problems: the problems in the order of the checks, at least one.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)
