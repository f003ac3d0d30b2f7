"""Errors of the disk, and of the paths that a user names: one sentence in place of what the system says."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OF_THE_DISK = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OF_PATHS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOTEMPTY)


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
