"""Files that can run code when they are loaded: they are read where nobody but this user could have written them."""

from __future__ import annotations

import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def write_own(path: Path, content: bytes) -> None:
    """Write a file for `read_own`: whatever the umask, nobody else may write to it or to its folder."""
    path.write_bytes(content)
    for place in (path, path.parent):
        with suppress(OSError):  # a file system without permissions; `read_own` will say so
            place.chmod(stat.S_IMODE(place.stat().st_mode) & ~WRITABLE_BY_OTHERS)


def read_own(path: Path, fix: str) -> bytes:
    """Return the content of a file that nobody but this user could have written.

    Whoever can write to its folder can put another file there. Folders above need no look: those who can write to them
    can put another folder there, which does not belong to this user.

    Args:
        path: of the file.
        fix: what to do where it is refused; ends the message.

    Raises:
        ValueError: the file or its folder belongs to another user, or others can write there.
    """
    with path.open("rb") as file:
        for place, state in ((path, os.fstat(file.fileno())), (path.parent, path.parent.stat())):
            if why := _why_not_own(state):
                raise ValueError(f"{path}: loading it can run code, and {place} {why}. {fix}")
        return file.read()


def _why_not_own(state: os.stat_result) -> str | None:
    if state.st_uid != os.geteuid():
        return f"belongs to {_user(state.st_uid)}, not to {_user(os.geteuid())}"
    if state.st_mode & WRITABLE_BY_OTHERS:
        return f"can be written by other users ({stat.filemode(state.st_mode)})"
    return None


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
