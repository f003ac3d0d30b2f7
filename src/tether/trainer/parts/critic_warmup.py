"""Critic warm-up: the policy begins to learn once the critic explains the returns."""

from __future__ import annotations

from dataclasses import dataclass

from tether.types import StateDict


@dataclass
class CriticWarmup:
    """Trains only the critic up to a step, and until it has once explained enough variance."""

    steps: int = 0
    """The step, counted from 1, before which only the critic learns, whatever it explains."""
    explained_variance: float | None = None
    """The share of the returns' variance that the critic must explain once; None requires none."""
    reached: bool = False
    """Whether the critic has explained that share once; the policy continues to learn if it gets worse later."""
    ended: bool = False
    """Whether the policy has learned in a step."""

    def is_over(self, step: int, explained_variance: float) -> bool:
        """Return whether the policy learns in this step.

        Args:
            step: the step, counted from 1.
            explained_variance: share of the variance of this step's returns that the values of its advantages explain;
                -inf if it is unknown.
        """
        self.reached |= self.explained_variance is None or explained_variance >= self.explained_variance
        is_over = step >= self.steps and self.reached
        self.ended |= is_over
        return is_over

    def unfinished_problem(self) -> str | None:
        """Return a message if the policy has learned in no step of the run, with the reason."""
        if self.ended:
            return None
        if self.reached:
            return f"the policy did not learn in this run: it ends before trainer.critic_warmup={self.steps}; lower it"
        return (
            "the policy did not learn in this run: critic/vf_explained_var never reached "
            f"trainer.critic_warmup_until_explained_variance={self.explained_variance}; "
            "lower it, train longer or raise critic.optim.lr"
        )

    def state_dict(self) -> StateDict:
        """Return whether the threshold was reached, and whether the policy has learned."""
        return {"reached": self.reached, "ended": self.ended}

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned; a threshold that was reached counts even if a new one is configured."""
        self.reached, self.ended = state["reached"], state["ended"]
