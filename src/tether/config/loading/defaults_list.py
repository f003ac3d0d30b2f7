"""The lines of a Hydra `defaults:` list, as they stand in a file, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tether.config.keys import show
from tether.config.problems import Problem

OWN = "_self_"
HERE, TOP, GROUP = "_here_", "_global_", "_group_"
"""Words of Hydra for places: of the naming file, the top, and the group."""
EXAMPLE = "defaults: [GROUP: NAME, _self_]"
_WORDS = {"optional", "override"}


@dataclass(frozen=True)
class Line:
    """One line of a defaults list: `group@package: choice`, or `file@package` without a choice."""

    written: str
    """As it stands in the file, for messages."""
    path: str
    """A group or a file, relative to the group of the naming file unless it begins with a slash."""
    package: str | None = None
    """Where it is mounted: the part after the @."""
    is_group: bool = False
    choice: str | list[str] | None = None
    is_optional: bool = False
    is_override: bool = False

    @property
    def is_interpolated(self) -> bool:
        """Whether the choice, or the file, follows from other choices."""
        return "${" in (self.path if self.choice is None else str(self.choice))

    def named(self) -> list[Line]:
        """The lines that each name one preset: itself, one for each of a list, or none where the choice is null."""
        if isinstance(self.choice, list):
            one = replace(self, is_group=False, choice=None)
            return [replace(one, path=f"{self.path}/{name}") for name in self.choice]
        return [self] if self.choice is not None or not self.is_group else []


def read_lines(tree: Mapping[object, object], file: str, problems: list[Problem]) -> list[Line]:
    """The lines of a file's defaults list, with its own keys last where no line says their place."""
    listed = tree.get("defaults", [])
    if not isinstance(listed, list):
        problems.append(_problem(f"defaults: {show(listed)}", file, "is no list", f"write it as one, {EXAMPLE}"))
        return [Line(OWN, OWN)]
    lines: list[Line] = []
    for item in listed:
        line = _read(item)
        if isinstance(line, Line):
            fault = _misplaced(line, lines)
            lines += [] if fault else [line]
        else:
            fault = line
        if fault:
            problems.append(_problem(_written(item), file, *fault))
    has_own = any(line.path == OWN for line in lines)
    return lines if has_own else [*lines, Line(OWN, OWN)]


def line_problem(line: Line, file: str, what: str, fix: str) -> Problem:
    """A problem with a line of a file."""
    return _problem(line.written, file, what, fix)


def _problem(written: str, file: str, what: str, fix: str) -> Problem:
    return Problem("defaults", f"in {file}.yaml, `{written}` {what}", fix)


def _written(item: object) -> str:
    if not isinstance(item, dict):
        return f"- {show(item)}"
    return "- " + ", ".join(f"{show(left)}: {show(choice)}" for left, choice in item.items())


Fault = tuple[str, str]
"""The problem of a line, and its fix."""


def _read(item: object) -> Line | Fault:
    left, choice = item, None
    if isinstance(item, dict):
        if len(item) != 1:
            return f"has {len(item)} groups", "give each group a line of its own"
        ((left, choice),) = item.items()
    if not isinstance(left, str):
        return "names no file", "write GROUP: NAME, or the name in quotes"
    name, at, package = left.partition("@")
    *words, path = name.split() or [""]
    if words and not isinstance(item, dict):
        return "names no choice", f"write {' '.join(words)} GROUP: NAME"
    if not path.strip("/") or not set(words) <= _WORDS:
        return "names no group", "write GROUP: NAME, with optional or override before it at most"
    if path == OWN and at:
        return "gives the file's own keys another place", "write `# @package NAME` as the first line of the file"
    if ".." in path.split("/") and not at:
        return "says no place for the keys of another folder", f"write {left}@PLACE, or the folder from the top, /GROUP"
    for value in choice if isinstance(choice, list) else [choice]:
        if not isinstance(value, str) and (value is not None or isinstance(choice, list)):
            return f"chooses {show(value)}, which is no text", f'write it in quotes, "{show(value)}"'
    if isinstance(choice, list) and any("${" in value for value in choice):
        return "has ${...} in a list of choices", "write the names"
    line = Line(_written(item), path, package if at else None, isinstance(item, dict), choice)
    return replace(line, is_optional="optional" in words, is_override="override" in words)


def _misplaced(line: Line, above: list[Line]) -> Fault | None:
    """Check the position of a line in its list."""
    if line.path == OWN:
        return ("stands there twice", "keep one of the two") if any(one.path == OWN for one in above) else None
    if not line.is_override and any(one.is_override for one in above):
        return "stands below an override", "put the overrides at the end of the list"
    return None


_HEADER_LENGTH = 512
"""Characters of a file that Hydra looks at for its header."""


def read_package(text: str, file: str, problems: list[Problem]) -> str | None:
    """The place that a file's `# @package` line gives its keys.

    As in Hydra, that line counts only where no other but empty lines and lines of its kind stands above it.
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
            problems.append(_problem(line, file, f"says {values[0]}, which counts in a defaults list alone", fix))
        elif name == "@package":
            package = values[0]
    return package
