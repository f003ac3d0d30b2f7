"""The best test of a run: its checkpoint is kept, and a run that is good enough ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tether.metrics.loggers import evaluation_score
from tether.trainer.checkpoint import Persistence
from tether.types import StateDict


@dataclass
class BestTest:
    """Remembers the highest score of all tests so far; see `tether.metrics.loggers.evaluation_score`."""

    persistence: Persistence | None = None
    """Where its checkpoint is kept; None: nowhere."""
    stop_at: float | None = None
    """Score that is enough; None: no score is."""
    score: float = -math.inf
    is_new: bool = False
    """The last test was the best."""

    @property
    def is_enough(self) -> bool:
        """Whether a test has reached the score that is enough."""
        return self.stop_at is not None and self.score >= self.stop_at

    def take(self, tested: Mapping[str, float]) -> None:
        """Compare a test with those before; without a score it is none."""
        score = evaluation_score(tested)
        self.is_new = score > self.score
        if self.is_new:
            self.score = score

    def state_dict(self) -> StateDict:
        """The best score so far."""
        return {"score": self.score}

    def load_state_dict(self, state: StateDict) -> None:
        """Take over what `state_dict` gave."""
        self.score = state["score"]
