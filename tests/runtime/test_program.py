"""Other programs: what they leave behind goes with them."""

import os
import signal
import time
from pathlib import Path

from tether.runtime.program import start_program


def test_the_folder_of_a_program_is_removed_even_if_its_owner_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["/bin/sh", "-c", 'touch "$FOLDER/socket"; echo "$FOLDER"; exec sleep 60']
    until, owner = time.monotonic() + 60, os.fork()
    if not owner:
        try:
            start_program(command, log, {}, "FOLDER").receive()  # which it never sends
        finally:
            os._exit(1)
    try:
        while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < until:
            time.sleep(0.05)
        folder = Path(log.read_text().strip())
        assert (folder / "socket").exists()
    finally:
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not folder.exists()
