"""Errors of the disk, of the paths that a user names, and of what files hold: one sentence that names the file."""

from __future__ import annotations

import errno
import json
import pickle
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tether.runtime.user_files import raised_by_tether

Json = TypeVar("Json", dict[str, Any], list[Any])

_FULL = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that a disk reports and a network never does."""
OF_THE_DISK = (errno.EACCES, errno.EPERM, *_FULL)
OF_PATHS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOTEMPTY)


def of_a_full_disk(error: BaseException | None) -> OSError | None:
    """The error of a disk that takes no more, which `error` is or was raised from; None: it is of something else."""
    while error is not None and not (isinstance(error, OSError) and error.errno in _FULL):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def writing(to: Path, fix: str) -> Iterator[None]:
    """Write inside the block.

    Args:
        to: begins the message.
        fix: what to do; ends it.

    Raises:
        ValueError: the disk is full or read-only, a path is none to write to, or of another kind.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in OF_THE_DISK + OF_PATHS:
            raise
        raise ValueError(f"{to}: cannot be written ({error.strerror or error}). {fix}") from error


ANOTHER_CHECKPOINT, COPY_AGAIN = "Take another checkpoint", "Copy the model's files again"
_REFUSED_PICKLE = re.compile(r"Weights only load failed.*?(?:WeightsUnpickler error:\s+|\n\n)(\w[^\n]*)", re.DOTALL)
_OF_CONTENT = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, EOFError, RecursionError,
    pickle.UnpicklingError, struct.error,
)  # fmt: skip
"""What readers of files, and those who take the content over, raise where it is not what they know."""


@contextmanager
def reading(file: Path, fix: str) -> Iterator[None]:
    """Read a file inside the block, and take its content over.

    Args:
        file: begins the message.
        fix: what to do; ends it.

    Raises:
        ValueError: the file cannot be read, or its content is not what it should be. One that tether raised inside
            says more, and is passed on with the name of the file.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror or error}). {fix}") from error
    except Exception as error:
        if type(error).__module__.startswith("tether."):
            raise
        if isinstance(error, ValueError) and raised_by_tether(error):
            if str(file.parent) in str(error):
                raise
            raise ValueError(f"{file}: {error}") from error
        if not is_of_content(error):
            raise
        raise ValueError(f"{file}: damaged, or of another kind ({in_a_line(error)}). {fix}") from error


def is_of_content(error: Exception) -> bool:
    """Whether an error may come of what a file holds."""
    of_torch = type(error) is RuntimeError and "memory" not in str(error)  # of a lack of memory others speak
    return of_torch or isinstance(error, _OF_CONTENT) or type(error).__name__ == "SafetensorError"


def in_a_line(error: Exception) -> str:
    """Return the kind of an error and the line that says most; not torch's advice to run the pickle."""
    text = str(error).strip() or "it ends too early"
    refused = _REFUSED_PICKLE.search(text)
    line = refused[1] if refused else text.splitlines()[0]
    return f"{type(error).__name__}: {line[:200].rstrip('. ')}"


def read_json(file: Path, kind: type[Json], fix: str) -> Json:
    """Return the content of a small file of JSON.

    Args:
        file: with an object or a list.
        kind: `dict` or `list`, whichever it should be.
        fix: what to do where it is not; see `reading`.

    Raises:
        ValueError: see `reading`.
    """
    with reading(file, fix):
        text = file.read_bytes()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested too deeply
        raise ValueError(f"{file}: is not JSON ({error}). {fix}") from error
    if not isinstance(content, kind):
        names = {dict: "an object", list: "a list"}
        raise ValueError(f"{file}: is not {names[kind]} of JSON: {content!r:.60}. {fix}")
    return content
