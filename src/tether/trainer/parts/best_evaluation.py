"""The best evaluation of a run, whose checkpoint is kept, and which may end the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tether.metrics.loggers import evaluation_score
from tether.trainer.checkpoint import Persistence
from tether.types import StateDict


@dataclass
class BestEvaluation:
    """Tracks the highest `tether.metrics.loggers.evaluation_score` of a run."""

    persistence: Persistence | None = None
    """Saves the checkpoint of the best evaluation; None keeps none."""
    stop_at: float | None = None
    """The score at which the run stops; None never stops it."""
    score: float = -math.inf
    is_new: bool = False
    """Whether the last evaluation was the best."""

    @property
    def reached_target(self) -> bool:
        """Whether an evaluation has reached the score at which the run stops."""
        return self.stop_at is not None and self.score >= self.stop_at

    def update(self, metrics: Mapping[str, float]) -> None:
        """Compare the score of an evaluation, if it has one, with those of earlier evaluations."""
        score = evaluation_score(metrics)
        self.is_new = score > self.score
        if self.is_new:
            self.score = score

    def state_dict(self) -> StateDict:
        """Return the best score so far."""
        return {"score": self.score}

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned."""
        self.score = state["score"]
