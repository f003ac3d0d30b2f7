"""Parsing of code blocks in a response."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

_FENCE = re.compile(r"(?P<before>[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(?P<marks>`{3,}|~{3,})(?P<info>[^`]*)")
_AT_THE_END = re.compile(r"(?<!`)(?P<marks>`{3,})(?P<info>[\w+#]+)[ \t\r]*\Z")
_TAG = re.compile(r"\{?\.?([\w+#]+)")
_MAX_INDENT = 4  # columns; a fence that is indented further than the block is code, such as a docstring


@dataclass(frozen=True)
class Block:
    """A block of code."""

    tag: str
    """Language in the info string, in lower case; "" if there is none."""
    code: str


@dataclass
class _Open:
    """A block without its end."""

    marks: str
    tag: str
    before: str = ""
    """Text before the fence, such as a list marker; the lines of the code are indented by its width."""
    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Add a line, without the indentation of the block."""
        blank = len(line) - len(line.lstrip(" \t"))
        self.lines.append(line[min(blank, len(self.before)) :])

    def ends_at(self, fence: re.Match[str]) -> bool:
        """Return whether this fence closes the block."""
        indent = len(fence["before"].expandtabs(4)) - len(self.before.expandtabs(4))
        return fence["marks"].startswith(self.marks) and not fence["before"].strip() and indent < _MAX_INDENT

    def close(self) -> Block:
        """Return the block with all added lines."""
        return Block(self.tag, "\n".join(self.lines))


def find_blocks(text: str, languages: Collection[str]) -> list[Block]:
    """Find the code blocks of a text; the last one may be truncated.

    A block begins with a fence of three or more marks at the beginning of a line, or after text if a language follows.
    It ends with a fence at the beginning of a line, or after its last line of code. All other marks are text or code,
    because responses quote how an answer has to begin.

    Args:
        text: a response.
        languages: valid languages of a block that begins after text.
    """
    blocks: list[Block] = []
    current: _Open | None = None
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line)
        if current is None:
            current = _open_block(line, fence, languages)
        elif fence and current.ends_at(fence):
            current.lines.append("")
            blocks.append(current.close())
            current = _open_block(line, fence, languages) if len(fence["info"].split()) == 1 else None
        elif _is_last(line, current.marks):
            current.add(line.rpartition(current.marks)[0])
            blocks.append(current.close())
            current = None
        else:
            current.add(line)
    return [*blocks, current.close()] if current else blocks


def _open_block(line: str, fence: re.Match[str] | None, languages: Collection[str]) -> _Open | None:
    """Return the block that begins in a line, if there is one."""
    if fence:
        # The first word is the language; further words, as in ```python title=a.py, describe how to display the block.
        words = fence["info"].lower().split()[:1]
        tag = _TAG.match(words[0]) if words else None
        return _Open(fence["marks"], tag[1] if tag else "".join(words), fence["before"])
    match = _AT_THE_END.search(line)
    language = match["info"].lower() if match else ""
    return _Open(match["marks"], language) if match and language in languages else None


def _is_last(line: str, marks: str) -> bool:
    """Return whether a block ends after the code of this line; marks in a comment are quotes."""
    code = line.strip()
    return code.endswith(marks) and line.count(marks) == 1 and not code.startswith(("#", marks))
