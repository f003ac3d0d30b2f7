"""Programs, their limits, and how they ended."""

from __future__ import annotations

import math
import resource
from dataclasses import dataclass, field
from typing import Literal


class SandboxError(Exception):
    """The sandbox itself failed, so nothing is known about the program."""


@dataclass(frozen=True)
class Limits:
    """The limits of a program."""

    seconds: float
    """Maximum processor time of a process in seconds; the maximum wall time is twice that."""
    memory_mb: int
    """Maximum memory of all processes together, in MiB."""
    processes: int
    """Maximum number of concurrent processes and threads."""
    output: int = 8 << 20
    """Maximum bytes of stdout and stderr together."""
    files: int = 64 << 20
    """Maximum bytes of files in each of /tmp and /dev/shm, which are in memory."""
    inodes: int = 4096
    """Maximum number of files and folders in each of these two."""
    startup: float = 5.0
    """Seconds that the sandbox may need to start on a busy machine; they are added to the wall time."""

    @property
    def wall_seconds(self) -> float:
        """Return the maximum wall time, which also ends a program that sleeps."""
        return self.startup + 2 * self.seconds

    def arguments(self, *, confined: bool) -> list[str]:
        """Return the arguments of ``prlimit``."""
        # Outside a sandbox this limit is per user, so it would affect other programs.
        cpu = math.ceil(self.seconds)
        return [
            f"--cpu={cpu}:{cpu + 1}",
            f"--data={self.memory_mb << 20}",
            f"--fsize={max(self.files, self.output)}",
            *(["--stack=unlimited:unlimited"] if _is_stack_unlimited() else []),
            "--core=0",
            "--nofile=256",
            *([f"--nproc={self.processes}", "--sigpending=256"] if confined else []),
        ]


def _is_stack_unlimited() -> bool:
    # Programming contests need deep recursion. A finite hard limit would not help: each thread would reserve as much as
    # the raised limit.
    return resource.getrlimit(resource.RLIMIT_STACK)[1] == resource.RLIM_INFINITY


@dataclass(frozen=True)
class Program:
    """A command and its files."""

    argv: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    """Name -> content of each file in the working directory; all are executable."""
    commands: tuple[str, ...] = ()
    """The only commands of the sandbox, whose root folder is writable and in memory; empty: those of this machine."""


@dataclass(frozen=True)
class Finished:
    """The result of a program that ended."""

    reason: Literal["exit", "time", "memory", "output", "files"]
    """`exit`, or the limit that it exceeded."""
    code: int
    """Exit code; 128 + n after signal n."""
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Return whether the program exited with code 0."""
        return self.reason == "exit" and self.code == 0
