"""Hides warnings that users cannot act on. It imports little, because worker processes import it first."""

from __future__ import annotations

import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def hide_warnings_of_packages() -> None:
    """Hide warnings of installed packages, which the user cannot act on.

    Warnings about tether's and the user's code are shown; all are shown if Python is configured to show warnings.
    """
    if sys.warnoptions:
        return
    show, packages = warnings.showwarning, Path(sysconfig.get_path("purelib"))
    package = Path(__file__).parents[1]

    def show_own(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if packages not in Path(filename).parents or package in Path(filename).parents:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_own


@contextmanager
def quiet_fork() -> Iterator[None]:
    """Hide the warning since Python 3.12 about a fork in a process with threads; the child waits for none of them."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        yield
