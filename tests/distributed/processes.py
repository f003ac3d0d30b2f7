"""Which processes of a run there are, as the system sees them."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def processes_of(folder: Path) -> dict[str, int]:
    """Rank's log -> its process, which has it as standard output."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            output = (process / "fd/1").readlink()
            if output.parent == folder / "ranks":
                found[output.name] = int(process.name)
    return found


def marked(mark: str) -> Iterator[str]:
    """Command of each process that inherited an environment variable of this name."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{mark}=".encode() in (process / "environ").read_bytes():
                yield (process / "cmdline").read_text().replace("\0", " ")
