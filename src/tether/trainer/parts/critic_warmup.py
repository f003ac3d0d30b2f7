"""When the policy begins to learn: not before the critic has something to say."""

from __future__ import annotations

from dataclasses import dataclass

from tether.types import StateDict


@dataclass
class CriticWarmup:
    """Holds the policy back up to a step, and until the critic has once explained enough variance."""

    steps: int = 0
    """Step, counted from 1, before which only the critic learns, whatever it explains."""
    explained_variance: float | None = None
    """Share of the returns' variance that the critic must explain once; None: none."""
    reached: bool = False
    """It has. The policy is not held back again if the critic falls behind later."""
    ended: bool = False
    """The policy has learned in a step."""

    def is_over(self, step: int, explained_variance: float) -> bool:
        """Does the policy learn in this step.

        Args:
            step: counted from 1.
            explained_variance: of this step's returns by the values that its advantages are made with; -inf where it
                is not known.
        """
        self.reached |= self.explained_variance is None or explained_variance >= self.explained_variance
        over = step >= self.steps and self.reached
        self.ended |= over
        return over

    def never_over(self) -> str | None:
        """At the end of a run: says that the policy learned in no step, and why."""
        if self.ended:
            return None
        if self.reached:
            return (
                f"the policy did not learn in this run: it ends before trainer.critic_warmup={self.steps}; lower that"
            )
        return (
            "the policy did not learn in this run: critic/vf_explained_var never reached "
            f"trainer.critic_warmup_until_explained_variance={self.explained_variance}; "
            "lower it, train longer or raise critic.optim.lr"
        )

    def state_dict(self) -> StateDict:
        """Whether the threshold was reached, and whether the policy has learned."""
        return {"reached": self.reached, "ended": self.ended}

    def load_state_dict(self, state: StateDict) -> None:
        """Take over what `state_dict` gave; with another threshold than before, what was reached still counts."""
        self.reached, self.ended = state["reached"], state["ended"]
