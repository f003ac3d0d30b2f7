"""A run whose policy has collapsed stops, or goes back to a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tether.checkpoints import CheckpointStore, Rollback


@dataclass(frozen=True)
class Rollbacks:
    """How often a run may go back to a checkpoint from before a collapse, and has done so."""

    store: CheckpointStore
    most: int
    done: Sequence[Rollback]
    factor: float
    """Of the policy's learning rate, for each of them."""

    def target(self, since: int) -> Path | None:
        """The newest checkpoint whose policy showed no sign, which is kept; None: there is none, or no rollback left.

        Args:
            since: first step with signs, in which the policy of the checkpoint before it acted. One that comes no later
                than that of the last collapse says that the checkpoint of that time was none to go back to.
        """
        if len(self.done) >= self.most:
            return None
        again = bool(self.done) and since <= self.done[-1].collapsed
        found = self.store.newest_before(min(since - 1, self.done[-1].to) if again else since - 1)
        self.store.spared = found
        return found

    def words(self, back: Path | None, since: int) -> str:
        """A message for the user: what is done."""
        if back is not None:
            return (
                f"trainer.on_collapse=rollback: signs of it began in step {since}; the run goes back to {back} with "
                f"{self.factor:g} times its learning rate (rollback {len(self.done) + 1} of {self.most})"
            )
        why = f"trainer.max_rollbacks={self.most} are used up"
        if len(self.done) < self.most:
            why = f"signs of it began in step {since}, and no earlier checkpoint is left to go back to"
        return f"trainer.on_collapse=rollback: {why}, so the run is saved and stops"


STOPS = (
    "trainer.on_collapse=stop: the run is saved and stops. Resume from an earlier checkpoint "
    "(trainer.resume_mode=resume_path) with other settings; the same command goes on as it is"
)
