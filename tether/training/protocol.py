"""What the trainer asks of a training engine, and what an engine asks of a loss.

The denominators of a loss are counted over the whole mini-batch before it is cut into micro-batches, so that the cut
cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tether.algorithms import Metric
from tether.batch import TrainBatch
from tether.keyed_random import generator, permutation
from tether.training.text.forward import PolicyOutputs, ValueOutputs
from tether.training.text.micro_batches import MicroBatching

Outputs = TypeVar("Outputs", PolicyOutputs, ValueOutputs)
Forward = Callable[[TrainBatch], Outputs]
"""A model's outputs for a micro-batch."""


@dataclass(frozen=True)
class LossSizes:
    """Counts over the whole mini-batch: the denominators that every micro-batch shares."""

    num_tokens: int
    num_sequences: int


@dataclass(frozen=True)
class LossTerm:
    """One micro-batch's share of the loss, and what to log about it."""

    loss: Tensor
    metrics: dict[str, Metric]
    """Exact over any split."""
    shares: dict[str, Tensor] = field(default_factory=dict)
    """Parts of the loss: summed over the micro-batches of a mini-batch, averaged over mini-batches."""


LossFunction = Callable[[Outputs, TrainBatch, LossSizes], LossTerm]
Prepare = Callable[[TrainBatch, Outputs, torch.Generator], None]
"""Fills in, in place, what a loss needs to know of a whole mini-batch, such as a ranking of its tokens. Called with the
mini-batch before it is cut, the model's present outputs for it (without gradients), and a generator for draws."""


@dataclass(frozen=True)
class UpdatePlan:
    """How often and in which pieces a rollout is learned from."""

    mini_batch_rows: int
    epochs: int = 1
    shuffle: bool = False
    seed: int = 42
    max_ratio: float | None = None
    """A mini-batch whose mean importance ratio is above it makes no optimizer step; None: each makes one."""

    def mini_batches(self, rows: int, step: int, epoch: int) -> Iterator[Tensor]:
        """Row numbers of each mini-batch; the last may be short, and without rows there is none.

        A permutation depends on (seed, step, epoch) alone.
        """
        order = torch.arange(rows)
        if self.shuffle:
            order = torch.from_numpy(permutation(rows, self.seed, step, "mini-batches", epoch))
        yield from order.split(self.mini_batch_rows) if rows else ()

    def generator(self, step: int, epoch: int, number: int) -> torch.Generator:
        """Draws for mini-batch `number` of an epoch, on the CPU; they depend on (seed, step, epoch, number) alone."""
        return generator(self.seed, step, "mini-batch", epoch, number)


@dataclass(frozen=True)
class Updated(Generic[Outputs]):
    """What came of an update."""

    metrics: dict[str, float]
    outputs: Outputs | None
    """Of each row of the batch when its turn first came, without gradients; zero where a row was left out, and None
    where all were."""


class TrainingEngine(Protocol[Outputs]):
    """Runs and updates one model: here, over many ranks, or with its layers split."""

    def infer(self, batch: TrainBatch, forward: Forward[Outputs], micro: MicroBatching | None = None) -> Outputs:
        """Run `forward` over all rows without gradients; the result's rows are in the batch's order."""
        ...

    def update(
        self,
        batch: TrainBatch,
        forward: Forward[Outputs],
        loss: LossFunction[Outputs],
        plan: UpdatePlan,
        step: int,
        prepare: Prepare[Outputs] | None = None,
    ) -> Updated[Outputs]:
        """Learn from a rollout: `plan.epochs` passes of mini-batches, one optimizer step each.

        Args:
            batch: all rows; rows without a valid token are left out.
            forward: the model's outputs for a micro-batch.
            loss: its share of the loss.
            plan: epochs and mini-batches.
            step: training step, counted from 0; sets the learning rate and the permutation.
            prepare: run on each mini-batch before it is cut; costs one more forward pass.

        Returns:
            What the model gave for each row, and metrics: those of the loss (ratios and clip fractions also of the
            first optimizer step alone), `grad_norm` (mean over optimizer steps), `lr`, `skipped_updates`, and
            `early_stops` where the plan has a `max_ratio`.
        """
        ...

    def save_model(self, folder: Path) -> None:
        """Write the model as a plain Hugging Face directory."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All state beside the weights."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of `state_dict`; the weights came with the model."""
        ...
