"""Text of any origin made harmless for a terminal."""

from __future__ import annotations

import sys
import unicodedata
from typing import TextIO

_DIRECTION = set("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Marks that reorder the text around them, so that a line reads other than it is."""


def printable(text: str) -> str:
    """Replace control characters, of which escape sequences are made, by spaces; drop marks that reorder text.

    Line ends and tabs stay; a lone surrogate, which no encoding can write, becomes U+FFFD.
    """
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    if character in "\n\t":
        return character
    category = unicodedata.category(character)
    if category == "Cs":
        return "\ufffd"
    if category in ("Zl", "Zp"):
        return "\n"
    if category == "Cc":
        return " "
    return "" if character in _DIRECTION else character


def print_harmlessly() -> None:
    """Make printable whatever this process prints from now on."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            _guard(stream)


def _guard(stream: TextIO) -> None:
    write = stream.write

    def write_printable(text: str, /) -> int:
        write(printable(text))
        return len(text)

    stream.write = write_printable  # type: ignore[method-assign]
