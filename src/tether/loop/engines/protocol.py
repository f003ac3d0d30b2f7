"""Protocols of training engines, losses and learners; a learner is a model in its role.

An engine owns a model, its optimizer and its shards. Its arguments (a forward, a loss, a plan) are plain, picklable
specs, and it returns tensors, so that an engine in this process and one on many ranks have the same interface.

The denominators of a loss are counted over the whole mini-batch before it is split into micro-batches, so that the
split cannot change the gradient.
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


class RowBatch(Protocol):
    """The data of an update by rows: `tether.batch.TrainBatch`, or the decisions of a control policy."""

    response_mask: Tensor
    """[B, T]: where the policy decided something that is trained on."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, rows: Any, /) -> Any:
        """Return some of the rows."""
        ...


Batch = TypeVar("Batch", bound=RowBatch)
Outputs = TypeVar("Outputs")
"""Outputs of a forward for the rows of a batch: a tensordict with as many rows."""

Forward = Callable[[Any, Batch, Any], Outputs]
"""Called with (model, micro-batch, the engine's reference model or None), and with the ranks that split the rows if
there are any; returns the model's outputs."""


@dataclass(frozen=True)
class LossSizes:
    """Token and row counts of the whole mini-batch, which are the denominators for every micro-batch."""

    num_tokens: int
    num_sequences: int


@dataclass(frozen=True)
class LossTerm:
    """One micro-batch's share of the loss, and metrics to log."""

    loss: Tensor
    metrics: dict[str, Metric]
    """Metrics that are exact for any split into micro-batches."""
    shares: dict[str, Tensor] = field(default_factory=dict)
    """Shares of the loss, which are summed over the micro-batches of a mini-batch and averaged over mini-batches."""


LossFunction = Callable[[Outputs, Batch, LossSizes], LossTerm]
Prepare = Callable[[Batch, Outputs, torch.Generator], None]
"""Fills in, in place, what a loss needs of a whole mini-batch, such as a ranking of its tokens; called with the
mini-batch before it is split, the model's current outputs for it (without gradients), and a random generator."""


@dataclass(frozen=True)
class LossSpec(Generic[Batch, Outputs]):
    """A loss, the forward that it is computed from, and a preparation of whole mini-batches."""

    forward: Forward[Batch, Outputs]
    function: LossFunction[Outputs, Batch]
    prepare: Prepare[Batch, Outputs] | None = None
    """The preparation, which costs one more forward pass over each mini-batch."""


@dataclass(frozen=True)
class UpdatePlan:
    """The epochs over a rollout, and its division into mini-batches."""

    mini_batch_rows: int
    epochs: int = 1
    shuffle: bool = False
    seed: int = 42
    max_ratio: float | None = None
    """Mean importance ratio above which a mini-batch makes no optimizer step; None for no limit."""
    target_kl: float | None = None
    """KL from the sampling policy that is the target or the limit, for control policies."""
    leads_rate: bool = False
    """Whether the learning rate adapts to the KL after each epoch: it falls if the KL is above twice `target_kl`, and
    rises if it is below half of it. Otherwise epochs end once the KL is above `target_kl`."""

    def mini_batches(self, rows: int, step: int, epoch: int) -> Iterator[Tensor]:
        """Yield the row indices of each mini-batch; the last may be smaller, and without rows there is none."""
        order = self.order(rows, step, epoch) if self.shuffle else torch.arange(rows)
        yield from order.split(self.mini_batch_rows) if rows else ()

    def order(self, rows: int, step: int, epoch: int) -> Tensor:
        """Return a permutation of the rows, which depends on (seed, step, epoch) alone."""
        return torch.from_numpy(permutation(rows, self.seed, step, "mini-batches", epoch))

    def generator(self, step: int, epoch: int, number: int) -> torch.Generator:
        """Return a CPU generator for mini-batch `number` of an epoch, which depends on (seed, step, epoch, number)
        alone."""
        return generator(self.seed, step, "mini-batch", epoch, number)


@dataclass(frozen=True)
class Updated(Generic[Outputs]):
    """The result of an update."""

    metrics: dict[str, float]
    outputs: Outputs | None = None
    """Outputs of each row of the batch in its first mini-batch, without gradients; zero for rows that were not trained
    on, and None if none were."""


CHECKED_BYTES = 2**30
"""Bytes of weights that `Engine.check_saving` writes at most before the first step: few enough to be quick."""


class Engine(Protocol[Batch, Outputs]):
    """Owns, runs and updates one model: in this process, over many ranks, or with its layers split."""

    version: int
    """Number of calls of `update` so far."""

    def infer(self, batch: Batch, forward: Forward[Batch, Outputs]) -> Outputs:
        """Run `forward` over all rows without gradients, and return the outputs in the batch's order."""
        ...

    def update(self, batch: Batch, loss: LossSpec[Batch, Outputs], plan: UpdatePlan, step: int) -> Updated[Outputs]:
        """Train on a rollout: `plan.epochs` passes of mini-batches, with one optimizer step each.

        Args:
            batch: all rows; those without a valid token are omitted.
            loss: the loss to minimise.
            plan: epochs and mini-batches.
            step: training step, counted from 0, which determines the learning rate and the permutation.

        Returns:
            The model's outputs for each row, and metrics: those of the loss (ratios and clip fractions also of the
            first optimizer step alone), `grad_norm` (mean over optimizer steps), `lr`, `skipped_updates`, and
            `early_stops` if the plan has a `max_ratio`.
        """
        ...

    def export(self) -> WeightUpdate:
        """Return the current weights without copying them."""
        ...

    def save(self, folder: Path) -> None:
        """Write the model so that it can be loaded without tether; for text in transformers' format."""
        ...

    def check_saving(self, folder: Path) -> None:
        """Write the model like `save`, or a share of its weights if it is large, to check that saving will work."""
        ...

    def saving(self, folder: Path, state: Path, *, copy: bool) -> Callable[[], None]:
        """Start to save the model and all training state.

        Args:
            folder: the folder of the model, as in `save`, with the name of the role.
            state: the file for the training state, in an existing folder.
            copy: copies the current state, so that training can go on while it is written.

        Returns:
            A function that writes, in any thread.
        """
        ...

    def load_state(self, file: Path) -> None:
        """Load the training state that `saving` wrote; the weights come with the model."""
        ...


@dataclass(frozen=True)
class Learner(Generic[Batch, Outputs]):
    """A policy or a critic that is trained, with its forward, loss and plan."""

    engine: Engine[Batch, Outputs]
    forward: Forward[Batch, Outputs]
    """The forward for inference over a rollout before the update."""
    loss: LossSpec[Batch, Outputs]
    plan: UpdatePlan
    critic_loss: LossSpec[Batch, Outputs] | None = None
    """The critic's loss, if it is part of the policy's model; None if it has its own model, or there is none."""
    loss_at: Callable[[int], tuple[LossSpec[Batch, Outputs], dict[str, float]]] | None = None
    """Maps the training step, counted from 0, to its loss and to the settings that change over the run; None if none
    do."""

    def infer(self, batch: Batch) -> Outputs:
        """Return the outputs for all rows, without gradients."""
        return self.engine.infer(batch, self.forward)

    def update(self, batch: Batch, step: int, *, critic_only: bool = False) -> Updated[Outputs]:
        """Train on the batch as `Engine.update` does, or only the critic with `critic_loss`."""
        loss, settings = self.loss_at(step) if self.loss_at else (self.loss, {})
        if critic_only:
            assert self.critic_loss
            loss, settings = self.critic_loss, {}
        updated = self.engine.update(batch, loss, self.plan, step)
        return replace(updated, metrics=updated.metrics | settings)


AnyLearner: TypeAlias = Learner[Any, Any]
"""A learner for any kind of batch, for code that only passes batches on."""
AnyLoss: TypeAlias = LossSpec[Any, Any]
