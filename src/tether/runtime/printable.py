"""Making text from any source harmless for a terminal."""

from __future__ import annotations

import sys
import unicodedata
from typing import TextIO

_DIRECTION = set("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Unicode marks that change the direction of the text around them."""


def printable(text: str) -> str:
    """Replace control characters, including those of escape sequences, by spaces, and drop marks that reorder text.

    Line ends and tabs stay; a lone surrogate, which cannot be encoded, becomes U+FFFD.
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
    """Apply `printable` to everything that this process prints from now on."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            _guard(stream)


def _guard(stream: TextIO) -> None:
    write = stream.write

    def write_printable(text: str, /) -> int:
        write(printable(text))
        return len(text)

    stream.write = write_printable  # type: ignore[method-assign]
