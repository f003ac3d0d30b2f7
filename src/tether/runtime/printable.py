"""Makes text from any source harmless for a terminal."""

from __future__ import annotations

import sys
import time
import unicodedata
from contextlib import suppress
from typing import TextIO

LONGEST_PRINT, PRINTED_A_MINUTE = 2**16, 2**20
"""Maximum characters that user code in a separate process may print at once and per minute."""

_DIRECTION = set("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Unicode marks that change the direction of the text around them."""


def printable(text: str) -> str:
    """Replace control characters, including those of escape sequences, by spaces, and drop marks that reorder text.

    Line ends and tabs are kept; a lone surrogate, which cannot be encoded, becomes U+FFFD.
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


def install_safe_printing() -> None:
    """Apply `printable` to everything that this process prints from now on, limit it, and make prints never fail."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            _guard(stream)


def _guard(stream: TextIO) -> None:
    write, flush = stream.write, stream.flush
    began, budget = time.monotonic(), PRINTED_A_MINUTE

    def write_printable(text: str, /) -> int:
        nonlocal began, budget
        if time.monotonic() - began > 60:
            began, budget = time.monotonic(), PRINTED_A_MINUTE
        if budget > 0:
            shown = text[: min(budget, LONGEST_PRINT)]
            budget -= len(shown)
            cut = f"... ({len(text) - len(shown)} more characters)\n" if len(shown) < len(text) else ""
            last = (
                "" if budget else f"(more than {PRINTED_A_MINUTE} characters in a minute: the others are not shown)\n"
            )
            with suppress(OSError):
                write(printable(shown) + cut + last)
        return len(text)

    def flush_if_possible() -> None:
        with suppress(OSError):
            flush()

    stream.write = write_printable  # type: ignore[method-assign]
    stream.flush = flush_if_possible  # type: ignore[method-assign]
