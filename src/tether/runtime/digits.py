"""Conversion of integers with many digits, which Python limits to 4300 digits by default to protect servers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MAX_DIGITS = 100_000
"""Maximum digits of an integer. Converting that many takes a quarter of a second; the time is quadratic."""
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
    """Whether an error means that Python refused an integer because of its number of digits."""
    return "integer string conversion" in str(error)
