"""Processes of a run on several devices: how long they are waited for, and their errors."""

from dataclasses import dataclass

STATUS = "ranks/status.json"
"""In the folder of a run: what each rank does."""


@dataclass(frozen=True)
class Deadlines:
    """How long the processes of a run are waited for, in seconds."""

    start: float = 600.0
    """For room, and for processes to start."""
    silence: float = 180.0
    """For a sign of life."""
    collective: float = 600.0
    """Of each rank for the others."""


@dataclass(frozen=True)
class Pool:
    """Devices of a run: as many on each of some machines."""

    nodes: int
    per_node: int
    section: str = "trainer"
    """Of the configuration, whose ``nnodes`` and ``n_gpus_per_node`` they are."""

    @property
    def size(self) -> int:
        """All of them."""
        return self.nodes * self.per_node


class RankFailed(ValueError):
    """A rank raised an error, or could not be started; the message names it, and why."""


class RankLost(RankFailed):
    """A rank died, gave no answer, or lost the others: to start again may help; the message has its last lines."""

    instead: tuple[str, int] | None = None
    """Key and value with which to start again, where a rank had no memory for its micro-batch."""
