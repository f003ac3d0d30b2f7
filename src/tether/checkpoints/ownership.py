"""Files that can run code when they are loaded, which are only read if no other user could have written them."""

from __future__ import annotations

import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def write_own(path: Path, content: bytes) -> None:
    """Write a file for `read_own`; whatever the umask, no other user can write to it or to its folder."""
    path.write_bytes(content)
    for place in (path, path.parent):
        with suppress(OSError):  # a file system without permissions; `read_own` will report it
            place.chmod(stat.S_IMODE(place.stat().st_mode) & ~WRITABLE_BY_OTHERS)


def read_own(path: Path, fix: str) -> bytes:
    """Return the content of a file that no other user could have written.

    Whoever can write to its folder can replace the file. Folders above need no check: replacing the folder from there
    would give it another owner.

    Args:
        path: path of the file.
        fix: what the user can do if the file is refused; ends the message.

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
