"""What a run does whose policy has collapsed: it stops, or continues from an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tether.checkpoints import CheckpointStore, Rollback


@dataclass(frozen=True)
class Rollbacks:
    """The rollbacks that a run has done and may still do, each to a checkpoint from before a collapse."""

    store: CheckpointStore
    max_rollbacks: int
    done: Sequence[Rollback]
    factor: float
    """The factor of the policy's learning rate for each rollback."""

    def target(self, since: int) -> Path | None:
        """Return the newest checkpoint without signs of a collapse, and protect it from deletion.

        Return None if there is no such checkpoint or no rollback left.

        Args:
            since: first step with signs of the collapse, in which the policy of the checkpoint before it acted. If it
                is not later than in the last collapse, the checkpoint of that rollback was too late.
        """
        if len(self.done) >= self.max_rollbacks:
            return None
        again = bool(self.done) and since <= self.done[-1].collapsed
        checkpoint = self.store.newest_before(min(since - 1, self.done[-1].to) if again else since - 1)
        self.store.spared = checkpoint
        return checkpoint

    def message(self, target: Path | None, since: int) -> str:
        """Return the message to the user about the rollback to `target`, or about its absence."""
        if target is not None:
            return (
                f"trainer.on_collapse=rollback: signs of it began in step {since}; the run goes back to {target} with "
                f"{self.factor:g} times its learning rate (rollback {len(self.done) + 1} of {self.max_rollbacks})"
            )
        reason = f"trainer.max_rollbacks={self.max_rollbacks} are used up"
        if len(self.done) < self.max_rollbacks:
            reason = f"signs of it began in step {since}, and no earlier checkpoint is left to go back to"
        return f"trainer.on_collapse=rollback: {reason}, so the run is saved and stops"


STOPS = (
    "trainer.on_collapse=stop: the run is saved and stops. Resume from an earlier checkpoint "
    "(trainer.resume_mode=resume_path) with other settings; the same command continues without changes"
)
