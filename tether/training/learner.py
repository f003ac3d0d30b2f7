"""A model in its role: what to run of it, which loss to lower, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from tether.batch import TrainBatch
from tether.training.protocol import Forward, LossFunction, Outputs, Prepare, TrainingEngine, Updated, UpdatePlan
from tether.training.text.micro_batches import MicroBatching


@dataclass(frozen=True)
class Learner(Generic[Outputs]):
    """A policy or a critic that is trained."""

    engine: TrainingEngine[Outputs]
    forward: Forward[Outputs]
    """What the loss is computed from."""
    loss: LossFunction[Outputs]
    plan: UpdatePlan
    infer_forward: Forward[Outputs]
    """What is computed of a rollout before the update."""
    infer_micro: MicroBatching
    prepare: Prepare[Outputs] | None = None
    """What the loss needs to know of a whole mini-batch."""

    def infer(self, batch: TrainBatch) -> Outputs:
        """Outputs for all rows, without gradients."""
        return self.engine.infer(batch, self.infer_forward, self.infer_micro)

    def update(self, batch: TrainBatch, step: int) -> Updated[Outputs]:
        """Learn from the batch; see `TrainingEngine.update`."""
        return self.engine.update(batch, self.forward, self.loss, self.plan, step, self.prepare)
