"""Files that one worker process makes and all of a test session read."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(name: str, make: Callable[[Path], object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder `name`, which the first process that asks for it fills by `make`.

    The others wait for it. A folder that `make` left half full, because it raised, is an error in each of them.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, done = shared / "made" / name, shared / "made" / f"{name}.done"
    folder.parent.mkdir(exist_ok=True)
    with (shared / "made" / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()  # raises where `make` failed before
            make(folder)
            done.touch()
    return folder
