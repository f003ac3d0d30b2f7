"""Whole numbers of any length as text: Python refuses more than 4300 digits, a guard of servers against strangers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.RLock()


@contextmanager
def any_digits() -> Iterator[None]:
    """Inside, text becomes whole numbers of any length, and they text; in one thread at a time."""
    with _LOCK:
        before = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            yield
        finally:
            sys.set_int_max_str_digits(before)
