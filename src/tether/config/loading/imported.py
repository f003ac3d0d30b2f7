"""A configuration file of another framework translated to native keys, with a line on the outcome for each key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tether.config.keys import show
from tether.config.loading.overrides import Override
from tether.config.problems import Problem

Status = Literal["mapped", "defaulted", "no effect", "not supported"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of translating one key."""

    key: str
    value: object
    status: Status
    native: Mapping[str, object] = field(default_factory=dict)
    """Native keys that it sets, with values."""
    why: str = ""
    fix: str = "leave it out"
    """The suggested fix if the value is not supported."""
    is_remark: bool = False
    """Whether the value is accepted although RLinf treats it differently; `why` explains the difference."""


@dataclass(frozen=True)
class Imported:
    """An RLinf file translated to native keys."""

    native: Mapping[str, object]
    """Native key -> value."""
    origins: Mapping[str, str]
    """Native key -> the RLinf key from which it was derived."""
    lines: tuple[Outcome, ...]
    """One entry for each key of the file, then one for each key that gets a default of RLinf."""
    problems: tuple[Problem, ...]
    """Problems of the file: unknown keys, contradictions, unreadable values."""
    other_overrides: tuple[Override, ...] = ()
    """Overrides that are not written in RLinf's keys."""
    left_open: Mapping[str, str] = field(default_factory=dict)
    """Native key that stays unset because a value is not supported -> the RLinf key with that value."""
    left_out: tuple[str, ...] = ()
    """Keys of the file that belong to another simulator, task or policy than the overrides select."""
    older_names: Mapping[str, str] = field(default_factory=dict)
    """Older key in the file, or older KEY=VALUE -> the current one."""

    def remarks(self) -> list[str]:
        """Return a note on each accepted value that RLinf treats differently."""
        return [f"{line.key}={show(line.value)}: {line.why}" for line in self.lines if line.is_remark]

    def refusals(self) -> list[Problem]:
        """Return a problem for each key that is not supported."""
        refused = [line for line in self.lines if line.status == "not supported"]
        return [Problem(line.key, f"{show(line.value)} is refused: {line.why}", line.fix) for line in refused]
