"""Where a quoted or bracketed part of bash ends; quotes and brackets in it are skipped as a whole."""

from __future__ import annotations


def end_of_substitution(text: str, begin: int) -> int:
    """Behind a ``$(...)``, ``<(...)`` or ``\`...\```, which begins at `begin`."""
    if text[begin] == "`":
        at = begin + 1
        while at < len(text) and text[at] != "`":
            at += 2 if text[at] == "\\" else 1
        return min(at + 1, len(text))
    depth, at = 0, begin + 1
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
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
