"""Timeouts and errors of the processes of a run on several devices."""

from dataclasses import dataclass

STATUS = "ranks/status.json"
"""File in the folder of a run that records the activity of each rank."""
SERVERS_STATUS = "servers.json"
"""File in the folder of a run that records the activity of each sampling server."""


@dataclass(frozen=True)
class Deadlines:
    """Timeouts for the processes of a run, in seconds."""

    start: float = 600.0
    """Timeout for devices to become free and for processes to start."""
    silence: float = 180.0
    """Maximum time without a heartbeat."""
    collective: float = 600.0
    """Timeout of a rank that waits for other ranks in a collective operation."""


@dataclass(frozen=True)
class Pool:
    """A pool of devices of a run: the same number on each machine."""

    nodes: int
    per_node: int
    section: str = "trainer"
    """Section of the configuration with ``nnodes`` and ``n_gpus_per_node``."""

    @property
    def size(self) -> int:
        """Total number of devices."""
        return self.nodes * self.per_node


class RankFailed(ValueError):
    """A rank raised an error or could not be started; the message names the rank and the reason."""


class RankLost(RankFailed):
    """A rank died, did not answer, or lost contact with other ranks. The message has its last output.

    `tether.commands.train` then restarts the run from its last checkpoint, at most ``trainer.max_restarts`` times.
    """

    instead: tuple[str, int] | None = None
    """Key and value to set at the restart, if a rank ran out of memory for its micro-batch."""
