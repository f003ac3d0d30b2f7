"""Blocks of code in a response, as models write them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

_FENCE = re.compile(r"(?P<before>[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(?P<marks>`{3,}|~{3,})(?P<info>[^`]*)")
_AT_THE_END = re.compile(r"(?<!`)(?P<marks>`{3,})(?P<info>[\w+#]+)[ \t\r]*\Z")
_TAG = re.compile(r"\{?\.?([\w+#]+)")
_WITHIN = 4  # columns further in than the block, marks belong to the code: to a docstring, for example


@dataclass(frozen=True)
class Block:
    """A block of code."""

    tag: str
    """The language that it says it is in, in small letters; "" where it names none."""
    code: str


@dataclass
class _Open:
    """A block whose end is not found yet."""

    marks: str
    tag: str
    before: str = ""
    """Stands before the marks: in a list, the lines of the code are moved in as far."""
    lines: list[str] = field(default_factory=list)

    def take(self, line: str) -> None:
        """Add a line, without the spaces by which the whole block is moved in."""
        blank = len(line) - len(line.lstrip(" \t"))
        self.lines.append(line[min(blank, len(self.before)) :])

    def ends_at(self, fence: re.Match[str]) -> bool:
        """Whether the block ends at these marks."""
        further_in = len(fence["before"].expandtabs(4)) - len(self.before.expandtabs(4))
        return fence["marks"].startswith(self.marks) and not fence["before"].strip() and further_in < _WITHIN

    def closed(self) -> Block:
        """The block, with all lines that it took."""
        return Block(self.tag, "\n".join(self.lines))


def find_blocks(text: str, languages: Collection[str]) -> list[Block]:
    """The blocks of a text; the last may be cut off.

    A block begins with three marks or more at the beginning of a line, or behind words with a language at its end. It
    ends with as many at the beginning of a line, or behind its last line of code. Other marks belong to the words or
    the code in which they stand: responses quote how an answer has to begin.

    Args:
        text: a response.
        languages: names that a block behind words may have.
    """
    blocks: list[Block] = []
    now: _Open | None = None
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line)
        if now is None:
            now = _begun(line, fence, languages)
        elif fence and now.ends_at(fence):
            now.lines.append("")
            blocks.append(now.closed())
            now = _begun(line, fence, languages) if len(fence["info"].split()) == 1 else None
        elif _is_last(line, now.marks):
            now.take(line.rpartition(now.marks)[0])
            blocks.append(now.closed())
            now = None
        else:
            now.take(line)
    return [*blocks, now.closed()] if now else blocks


def _begun(line: str, fence: re.Match[str] | None, languages: Collection[str]) -> _Open | None:
    """The block that begins in a line."""
    if fence:
        # The first word is the language: others, as in ```python title=a.py, say how to show the block.
        words = fence["info"].lower().split()[:1]
        tag = _TAG.match(words[0]) if words else None
        return _Open(fence["marks"], tag[1] if tag else "".join(words), fence["before"])
    behind = _AT_THE_END.search(line)
    tag_behind = behind["info"].lower() if behind else ""
    return _Open(behind["marks"], tag_behind) if behind and tag_behind in languages else None


def _is_last(line: str, marks: str) -> bool:
    """Whether a block ends behind the code of this line; in a comment, marks are quoted."""
    code = line.strip()
    return code.endswith(marks) and line.count(marks) == 1 and not code.startswith(("#", marks))
