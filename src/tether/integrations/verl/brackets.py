"""Where a quoted or bracketed part of bash ends; quotes and brackets in it are skipped as a whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

HEREDOC = re.compile(r"""<<(-?)(?!<)[ \t]*(?:'([^'\n]*)'|"([^"\n]*)"|\\?([^\s;&|<>()'"\\]+))""")


@dataclass(frozen=True)
class Heredoc:
    """Text below a command that is its input."""

    last: str
    """The line that ends it."""
    may_be_indented: bool

    @classmethod
    def of(cls, found: re.Match[str]) -> Heredoc:
        """Read what `HEREDOC` found."""
        return cls(found[2] or found[3] or found[4] or "", bool(found[1]))


def end_of_heredocs(text: str, begin: int, heredocs: Sequence[Heredoc]) -> int:
    """Behind the heredocs that begin in the line at `begin`."""
    at = begin
    for one in heredocs:
        indent = r"\t*" if one.may_be_indented else ""
        end = re.compile(rf"^{indent}{re.escape(one.last)}$\n?", re.MULTILINE).search(text, at)
        at = end.end() if end else len(text)
    return at


def end_of_substitution(text: str, begin: int) -> int:
    r"""Behind a ``$(...)``, ``<(...)`` or ``\`...\```, which begins at `begin`."""
    if text[begin] == "`":
        at = begin + 1
        while at < len(text) and text[at] != "`":
            at += 2 if text[at] == "\\" else 1
        return min(at + 1, len(text))
    depth, at = 0, begin + 1
    is_arithmetic = text.startswith("((", at)
    heredocs: list[Heredoc] = []
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
        elif char == "#" and text[at - 1] in " \t\n;&|(" and not is_arithmetic:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif char == "<" and not is_arithmetic and (found := HEREDOC.match(text, at)):
            heredocs.append(Heredoc.of(found))
            at = found.end()
        elif char == "\n" and heredocs:
            at, heredocs = end_of_heredocs(text, at + 1, heredocs), []
        elif char == "'":
            end = text.find("'", at + 1)
            at = len(text) if end < 0 else end + 1
        elif char == '"':
            at = end_of_quotes(text, at)
        else:
            depth, at = depth + {"(": 1, ")": -1}.get(char, 0), at + 1
            if depth == 0:
                break
    return min(at, len(text))


def end_of_quotes(text: str, begin: int) -> int:
    """Behind a ``"..."``."""
    at = begin + 1
    while at < len(text) and text[at] != '"':
        at = _behind(text, at)
    return min(at + 1, len(text))


def end_of_braces(text: str, begin: int) -> int:
    """Behind a ``${...}``, in whose default others may be."""
    at = begin + 2
    while at < len(text) and text[at] != "}":
        at = end_of_quotes(text, at) if text[at] == '"' else _behind(text, at)
    return min(at + 1, len(text))


def _behind(text: str, at: int) -> int:
    """Behind one character, or what it begins."""
    if text.startswith("$(", at) or text[at] == "`":
        return end_of_substitution(text, at)
    if text.startswith("${", at):
        return end_of_braces(text, at)
    return at + (2 if text[at] == "\\" else 1)


def end_of_brace_list(text: str, begin: int) -> int | None:
    """Behind a ``{a,b}`` or ``{1..3}``, of which bash makes several words; None: the brace at `begin` is text."""
    depth, at, is_list = 0, begin, False
    while at < len(text) and text[at] not in " \t\n;&|()<>":
        char = text[at]
        if char == "'":
            at = text.find("'", at + 1)
            if at < 0:
                return None
        elif char == '"' or text.startswith("${", at):
            at = (end_of_quotes(text, at) if char == '"' else end_of_braces(text, at)) - 1
        elif char == "\\":
            at += 1
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return at + 1 if is_list else None
        elif depth == 1 and (char == "," or text.startswith("..", at)):
            is_list = True
        at += 1
    return None
