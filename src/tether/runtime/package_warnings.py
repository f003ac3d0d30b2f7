"""Warnings that a user can do nothing about, and how they are hidden. Imports little: worker processes do so first."""

from __future__ import annotations

import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def hide_warnings_of_packages() -> None:
    """Hide warnings of installed packages, about which the user can do nothing.

    Warnings about tether's and the user's code are shown, and all are if Python is configured to show some.
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
    """Hide that Python 3.12 and later warn of a fork in a process with threads: the copy waits for none of them."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        yield
