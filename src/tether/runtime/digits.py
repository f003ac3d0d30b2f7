"""Conversion of integers with many digits: by default Python limits them to 4300, to protect servers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MAX_DIGITS = 100_000
"""Maximum digits of an integer, which take a quarter of a second; the time is quadratic."""
_LOCK = threading.RLock()


@contextmanager
def many_digits() -> Iterator[None]:
    """Allow conversion between text and integers of up to `MAX_DIGITS`; in one thread at a time."""
    with _LOCK:
        before = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(MAX_DIGITS)
        try:
            yield
        finally:
            sys.set_int_max_str_digits(before)


def has_too_many_digits(error: ValueError) -> bool:
    """Whether Python refused an integer because of its length."""
    return "integer string conversion" in str(error)
