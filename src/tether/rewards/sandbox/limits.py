"""Limits of a program, and its end."""

from __future__ import annotations

import math
import resource
from dataclasses import dataclass, field
from typing import Literal


class SandboxError(Exception):
    """The sandbox itself failed, so nothing is known about the program."""


@dataclass(frozen=True)
class Limits:
    """The limits of one program."""

    seconds: float
    """Of processor time in one process, and twice that by the clock."""
    memory_mb: int
    """MiB of all its processes together."""
    processes: int
    """Processes and threads at once."""
    output: int = 8 << 20
    """Bytes that it may print."""
    files: int = 64 << 20
    """Bytes that it may write to each of /tmp and /dev/shm, which are in memory."""
    inodes: int = 4096
    """Files and folders that it may make in each of them."""
    startup: float = 5.0
    """Seconds by the clock in which a sandbox may be set up on a busy machine; they are not the program's."""

    @property
    def wall_seconds(self) -> float:
        """Seconds by the clock: a busy machine gets twice the time, and a program that sleeps ends all the same."""
        return self.startup + 2 * self.seconds

    def arguments(self, *, confined: bool) -> list[str]:
        """For ``prlimit``. Processes count per user outside of a sandbox: there the limit would be on others, too."""
        cpu = math.ceil(self.seconds)
        return [
            f"--cpu={cpu}:{cpu + 1}",
            f"--data={self.memory_mb << 20}",
            f"--fsize={max(self.files, self.output)}",
            *(["--stack=unlimited:unlimited"] if _may_have_any_stack() else []),
            "--core=0",
            "--nofile=256",
            *([f"--nproc={self.processes}", "--sigpending=256"] if confined else []),
        ]


def _may_have_any_stack() -> bool:
    """Whether stacks may grow as far as memory goes, since recursion is deep in contests.

    A limit that this machine sets is left alone: raised to it, each thread would reserve so much.
    """
    return resource.getrlimit(resource.RLIMIT_STACK)[1] == resource.RLIM_INFINITY


@dataclass(frozen=True)
class Program:
    """A command, with the files that it needs."""

    argv: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    """Name -> content in the folder where it runs; all are executable."""


@dataclass(frozen=True)
class Finished:
    """The end of a program."""

    reason: Literal["exit", "time", "memory", "output", "files"]
    """It exited by itself, or the limit that ended it."""
    code: int
    """Exit code; 128 + n after signal n."""
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def succeeded(self) -> bool:
        """It exited by itself, with 0."""
        return self.reason == "exit" and self.code == 0
