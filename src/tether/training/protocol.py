"""The protocols of training engines and losses, and of a learner: a model in its role.

An engine owns a model, its optimizer and its shards. What it is asked for (a forward, a loss, a plan) are plain,
picklable specs; tensors come back. So the same calls reach an engine in this process and one on many ranks.

The denominators of a loss are counted over the whole mini-batch before it is cut into micro-batches, so that the cut
cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from tether.algorithms import Metric
from tether.batch import WeightUpdate
from tether.keyed_random import generator, permutation


class Rows(Protocol):
    """The data of an update, row by row: `tether.batch.TrainBatch`, or the decisions of a control policy."""

    response_mask: Tensor
    """[B, T] where the policy decided something that it learns from."""

    def __len__(self) -> int:
        """Rows."""
        ...

    def __getitem__(self, rows: Any, /) -> Any:
        """Some of the rows."""
        ...


Batch = TypeVar("Batch", bound=Rows)
Outputs = TypeVar("Outputs")
"""Outputs of a forward for the rows of a batch; a tensordict of that many rows."""

Forward = Callable[[Any, Batch, Any], Outputs]
"""(model, micro-batch, the engine's reference model or None) -> the model's outputs. Ranks that share their rows are a
fourth argument."""


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


LossFunction = Callable[[Outputs, Batch, LossSizes], LossTerm]
Prepare = Callable[[Batch, Outputs, torch.Generator], None]
"""Fills in, in place, what a loss needs to know of a whole mini-batch, such as a ranking of its tokens. Called with the
mini-batch before it is cut, the model's present outputs for it (without gradients), and a generator for draws."""


@dataclass(frozen=True)
class LossSpec(Generic[Batch, Outputs]):
    """A loss, the forward that it is computed from, and what must be known of a whole mini-batch first."""

    forward: Forward[Batch, Outputs]
    function: LossFunction[Outputs, Batch]
    prepare: Prepare[Batch, Outputs] | None = None
    """Costs one more forward pass over each mini-batch."""


@dataclass(frozen=True)
class UpdatePlan:
    """Epochs over a rollout, and the pieces that it is learned from."""

    mini_batch_rows: int
    epochs: int = 1
    shuffle: bool = False
    seed: int = 42
    max_ratio: float | None = None
    """A mini-batch whose mean importance ratio is above it makes no optimizer step; None: each makes one."""
    target_kl: float | None = None
    """KL from the policy that sampled that is aimed at, or not to be passed; of control policies."""
    leads_rate: bool = False
    """With target_kl: after each epoch lower the learning rate where the KL is above twice the target, raise it where
    it is below half; else no further epoch once the KL is above it."""

    def mini_batches(self, rows: int, step: int, epoch: int) -> Iterator[Tensor]:
        """Row numbers of each mini-batch; the last may be short, and without rows there is none."""
        order = self.order(rows, step, epoch) if self.shuffle else torch.arange(rows)
        yield from order.split(self.mini_batch_rows) if rows else ()

    def order(self, rows: int, step: int, epoch: int) -> Tensor:
        """A permutation of the rows; it depends on (seed, step, epoch) alone."""
        return torch.from_numpy(permutation(rows, self.seed, step, "mini-batches", epoch))

    def generator(self, step: int, epoch: int, number: int) -> torch.Generator:
        """Draws for mini-batch `number` of an epoch, on the CPU; they depend on (seed, step, epoch, number) alone."""
        return generator(self.seed, step, "mini-batch", epoch, number)


@dataclass(frozen=True)
class Updated(Generic[Outputs]):
    """The result of an update."""

    metrics: dict[str, float]
    outputs: Outputs | None = None
    """Of each row of the batch when its turn first came, without gradients; zero where a row was left out, and None
    where all were."""


class Engine(Protocol[Batch, Outputs]):
    """Owns, runs and updates one model: here, over many ranks, or with its layers split."""

    version: int
    """Calls of `update` so far."""

    def infer(self, batch: Batch, forward: Forward[Batch, Outputs]) -> Outputs:
        """Run `forward` over all rows without gradients; the result's rows are in the batch's order."""
        ...

    def update(self, batch: Batch, loss: LossSpec[Batch, Outputs], plan: UpdatePlan, step: int) -> Updated[Outputs]:
        """Learn from a rollout: `plan.epochs` passes of mini-batches, one optimizer step each.

        Args:
            batch: all rows; rows without a valid token are left out.
            loss: what is lowered.
            plan: epochs and mini-batches.
            step: training step, counted from 0; sets the learning rate and the permutation.

        Returns:
            The model's outputs for each row, and metrics: those of the loss (ratios and clip fractions also of the
            first optimizer step alone), `grad_norm` (mean over optimizer steps), `lr`, `skipped_updates`, and
            `early_stops` where the plan has a `max_ratio`.
        """
        ...

    def export(self) -> WeightUpdate:
        """The current weights, without copying them."""
        ...

    def save(self, folder: Path) -> None:
        """Write the model so that it can be loaded without tether's optimizer: for text a plain Hugging Face
        directory."""
        ...

    def check_saving(self, folder: Path) -> None:
        """Write what `save` writes, of a large model a share of the weights: before a step, to see that it can be."""
        ...

    def saving(self, folder: Path, state: Path, *, copy: bool) -> Callable[[], None]:
        """Begin to save the model and all state beside the weights.

        Args:
            folder: for the model, see `save`. Its name is the role's.
            state: file for the rest; its folder is there.
            copy: what is written is of now, whatever is learned meanwhile; else nothing may be.

        Returns:
            What does the rest, in any thread.
        """
        ...

    def load_state(self, file: Path) -> None:
        """Take over the state that was saved beside the weights, which came with the model."""
        ...


@dataclass(frozen=True)
class Learner(Generic[Batch, Outputs]):
    """A policy or a critic that is trained."""

    engine: Engine[Batch, Outputs]
    forward: Forward[Batch, Outputs]
    """Inferred from a rollout before the update."""
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


AnyLearner: TypeAlias = Learner[Any, Any]
"""Of any kind of batch, for code that only hands batches on."""
AnyLoss: TypeAlias = LossSpec[Any, Any]
