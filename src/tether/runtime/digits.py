"""Whole numbers of many digits as text: Python refuses more than 4300, a guard of servers against strangers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOST_DIGITS = 100_000
"""Of a number that is read: a quarter of a second. Ten times as many take a hundred times as long."""
_LOCK = threading.RLock()


@contextmanager
def many_digits() -> Iterator[None]:
    """Inside, text becomes whole numbers of up to `MOST_DIGITS`, and they text; in one thread at a time."""
    with _LOCK:
        before = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(MOST_DIGITS)
        try:
            yield
        finally:
            sys.set_int_max_str_digits(before)


def has_too_many_digits(error: ValueError) -> bool:
    """Whether Python refused a whole number for its length."""
    return "integer string conversion" in str(error)
