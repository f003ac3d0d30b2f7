"""Converts errors of the disk, of paths and of file contents into one sentence that names the file."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shlex
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tether.runtime.user_files import raised_by_tether

Json = TypeVar("Json", dict[str, Any], list[Any])

_FULL = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers that a disk reports but a network does not."""
OF_THE_DISK = (errno.EACCES, errno.EPERM, *_FULL)
OF_PATHS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOTEMPTY)


def full_disk_error(error: BaseException | None) -> OSError | None:
    """Return the error of a full or read-only disk that caused `error`, or None."""
    while error is not None and not (isinstance(error, OSError) and error.errno in _FULL):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def writing(to: Path, fix: str) -> Iterator[None]:
    """Turn errors of writing inside the block into a ValueError.

    Args:
        to: start of the message.
        fix: end of the message: what the user can do.

    Raises:
        ValueError: the disk is full or read-only, or a path is not writable or of the wrong kind.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in OF_THE_DISK + OF_PATHS:
            raise
        raise ValueError(f"{to}: cannot be written ({error.strerror or error}). {fix}") from error


def follow_umask(folder: Path, like: Path) -> None:
    """Give the weights below a folder the permissions of the file `like`, which was created with the user's umask.

    safetensors creates files that only the owner can read.
    """
    permissions = stat.S_IMODE(like.stat().st_mode)
    for path in folder.rglob("*.safetensors"):
        if not path.is_symlink():
            path.chmod(permissions)


def check_readable(paths: Iterable[Path]) -> None:
    """Refuse paths that this user has no permission to read; readers would report them as missing or damaged.

    Raises:
        ValueError: a path cannot be read.
    """
    for path in paths:
        try:
            path.stat()
        except PermissionError:
            refused = True
        except OSError:  # it does not exist
            refused = False
        else:
            refused = not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0))
        if refused:
            raise ValueError(
                f"{path}: you have no permission to read it. Whoever it belongs to can give it, by "
                f"{shlex.join(['chmod', '-R', 'a+rX', str(path)])} and a+x for the folders above"
            )


ANOTHER_CHECKPOINT, COPY_AGAIN = "Take another checkpoint", "Copy the model's files again"
_REFUSED_PICKLE = re.compile(r"Weights only load failed.*?(?:WeightsUnpickler error:\s+|\n\n)(\w[^\n]*)", re.DOTALL)
_CONTENT_ERRORS = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, EOFError, RecursionError,
    pickle.UnpicklingError, struct.error,
)  # fmt: skip
"""Exceptions raised for unexpected file content, by the code that reads or uses it."""


@contextmanager
def reading(file: Path, fix: str) -> Iterator[None]:
    """Turn errors of reading a file inside the block, or of using its content, into a ValueError.

    Args:
        file: start of the message.
        fix: end of the message: what the user can do.

    Raises:
        ValueError: the file cannot be read or its content is wrong. The text of tether's own ValueErrors is kept,
            prefixed with the name of the file.
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
        if not is_content_error(error):
            raise
        raise ValueError(f"{file}: damaged, or of another kind ({summarize_error(error)}). {fix}") from error


def is_content_error(error: Exception) -> bool:
    """Whether an error may be caused by the content of a file."""
    of_torch = type(error) is RuntimeError and "memory" not in str(error)  # lack of memory is reported elsewhere
    return of_torch or isinstance(error, _CONTENT_ERRORS) or type(error).__name__ == "SafetensorError"


def summarize_error(error: Exception) -> str:
    """Return an error's type and its most informative line, without torch's advice to disable safe loading."""
    text = str(error).strip() or "it ends too early"
    refused = _REFUSED_PICKLE.search(text)
    line = refused[1] if refused else text.splitlines()[0]
    return f"{type(error).__name__}: {line[:200].rstrip('. ')}"


def read_json(file: Path, kind: type[Json], fix: str) -> Json:
    """Return the content of a small JSON file.

    Raises:
        ValueError: the file cannot be read or is invalid, as in `reading`.
    """
    with reading(file, fix):
        text = file.read_bytes()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or nested too deeply
        raise ValueError(f"{file}: is not JSON ({error}). {fix}") from error
    if not isinstance(content, kind):
        names = {dict: "an object", list: "a list"}
        raise ValueError(f"{file}: is not {names[kind]} of JSON: {content!r:.60}. {fix}")
    return content
