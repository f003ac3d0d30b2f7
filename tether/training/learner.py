"""A model in its role: what is inferred from it, which loss it lowers, and how often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic

from tether.training.protocol import Batch, Engine, Forward, LossSpec, Outputs, Updated, UpdatePlan


@dataclass(frozen=True)
class Learner(Generic[Batch, Outputs]):
    """A policy or a critic that is trained."""

    engine: Engine[Batch, Outputs]
    forward: Forward[Batch, Outputs]
    """What is inferred from a rollout before the update."""
    loss: LossSpec[Batch, Outputs]
    plan: UpdatePlan
    critic_loss: LossSpec[Batch, Outputs] | None = None
    """The critic's alone, where it is part of the policy's model; None: it is a model of its own, or there is none."""
    loss_at: Callable[[int], tuple[LossSpec[Batch, Outputs], dict[str, float]]] | None = None
    """Training step, from 0 -> what `loss` is in it, and its settings that change over the run; None: none does."""

    def infer(self, batch: Batch) -> Outputs:
        """Outputs for all rows, without gradients."""
        return self.engine.infer(batch, self.forward)

    def update(self, batch: Batch, step: int, *, critic_only: bool = False) -> Updated[Outputs]:
        """Learn from the batch; see `Engine.update`. `critic_only`: by `critic_loss`, which must be there."""
        loss, settings = self.loss_at(step) if self.loss_at else (self.loss, {})
        if critic_only:
            assert self.critic_loss
            loss, settings = self.critic_loss, {}
        updated = self.engine.update(batch, loss, self.plan, step)
        return replace(updated, metrics=updated.metrics | settings)
