"""Errors of the disk, and of the paths that a user names: one sentence in place of what the system says."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
