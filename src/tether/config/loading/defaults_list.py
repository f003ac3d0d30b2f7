"""The lines of a Hydra `defaults:` list as written in a file, and their problems."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tether.config.keys import show
from tether.config.problems import Problem

SELF = "_self_"
HERE, TOP, GROUP = "_here_", "_global_", "_group_"
"""Hydra's names of mount points: the file with the list, the top level, and the group."""
EXAMPLE = "defaults: [GROUP: NAME, _self_]"
_WORDS = {"optional", "override"}


@dataclass(frozen=True)
class Line:
    """One line of a defaults list: `group@package: choice`, or `file@package` without a choice."""

    written: str
    """The line as written, for messages."""
    path: str
    """A group or a file, relative to the group of the file with the list unless it begins with a slash."""
    package: str | None = None
    """The mount point, after the @."""
    is_group: bool = False
    choice: str | list[str] | None = None
    is_optional: bool = False
    is_override: bool = False

    @property
    def is_interpolated(self) -> bool:
        """Whether the choice or the file is interpolated from other choices."""
        return "${" in (self.path if self.choice is None else str(self.choice))

    def named(self) -> list[Line]:
        """Return lines that name one preset each: this one, one per choice of a list, or none if the choice is null."""
        if isinstance(self.choice, list):
            one = replace(self, is_group=False, choice=None)
            return [replace(one, path=f"{self.path}/{name}") for name in self.choice]
        return [self] if self.choice is not None or not self.is_group else []


def read_lines(tree: Mapping[object, object], file: str, problems: list[Problem]) -> list[Line]:
    """Return the lines of a file's defaults list, with `_self_` at the end if no line has it."""
    items = tree.get("defaults", [])
    if not isinstance(items, list):
        problems.append(_problem(f"defaults: {show(items)}", file, "is no list", f"write it as one, {EXAMPLE}"))
        return [Line(SELF, SELF)]
    lines: list[Line] = []
    for item in items:
        line = _read(item)
        if isinstance(line, Line):
            fault = _misplaced(line, lines)
            lines += [] if fault else [line]
        else:
            fault = line
        if fault:
            problems.append(_problem(_written(item), file, *fault))
    has_own = any(line.path == SELF for line in lines)
    return lines if has_own else [*lines, Line(SELF, SELF)]


def line_problem(line: Line, file: str, what: str, fix: str) -> Problem:
    """Return a problem with a line of a file."""
    return _problem(line.written, file, what, fix)


def _problem(written: str, file: str, what: str, fix: str) -> Problem:
    return Problem("defaults", f"in {file}.yaml, `{written}` {what}", fix)


def _written(item: object) -> str:
    if not isinstance(item, dict):
        return f"- {show(item)}"
    return "- " + ", ".join(f"{show(key)}: {show(choice)}" for key, choice in item.items())


Fault = tuple[str, str]
"""The problem of a line, and its fix."""


def _read(item: object) -> Line | Fault:
    key, choice = item, None
    if isinstance(item, dict):
        if len(item) != 1:
            return f"has {len(item)} groups", "give each group a line of its own"
        ((key, choice),) = item.items()
    if not isinstance(key, str):
        return "names no file", "write GROUP: NAME, or the name in quotes"
    name, at, package = key.partition("@")
    *words, path = name.split() or [""]
    if words and not isinstance(item, dict):
        return "names no choice", f"write {' '.join(words)} GROUP: NAME"
    if not path.strip("/") or not set(words) <= _WORDS:
        return "names no group", "write GROUP: NAME, with optional or override before it at most"
    if path == SELF and at:
        return "mounts the file's own keys elsewhere", "write `# @package NAME` as the first line of the file"
    if ".." in path.split("/") and not at:
        return (
            "has no mount point for the keys of another folder",
            f"write {key}@KEY, or the folder from the top, /GROUP",
        )
    for value in choice if isinstance(choice, list) else [choice]:
        if not isinstance(value, str) and (value is not None or isinstance(choice, list)):
            return f"chooses {show(value)}, which is not a string", f'write it in quotes, "{show(value)}"'
    if isinstance(choice, list) and any("${" in value for value in choice):
        return "has ${...} in a list of choices", "write the names"
    line = Line(_written(item), path, package if at else None, isinstance(item, dict), choice)
    return replace(line, is_optional="optional" in words, is_override="override" in words)


def _misplaced(line: Line, previous: list[Line]) -> Fault | None:
    """Check the position of a line in its list."""
    if line.path == SELF:
        return ("is written twice", "keep one of the two") if any(other.path == SELF for other in previous) else None
    if not line.is_override and any(other.is_override for other in previous):
        return "comes after an override", "put the overrides at the end of the list"
    return None


_HEADER_LENGTH = 512
"""Characters of a file in which Hydra looks for its header."""


def read_package(text: str, file: str, problems: list[Problem]) -> str | None:
    """Return the package in a file's `# @package` line.

    As in Hydra, only empty lines and lines that begin with `# @` may precede it.
    """
    package = None
    for line in map(str.strip, text[:_HEADER_LENGTH].splitlines()):
        if not line:
            continue
        if not re.match(r"#\s*@", line):
            break
        name, *values = line.removeprefix("#").split()
        if len(values) != 1:
            problems.append(_problem(line, file, "is not a name and one word", "write # @package NAME"))
        elif name == "@package" and values[0] in (HERE, GROUP):
            fix = "take the line out: without it the file is mounted at its group"
            problems.append(_problem(line, file, f"says {values[0]}, which is valid in a defaults list only", fix))
        elif name == "@package":
            package = values[0]
    return package
