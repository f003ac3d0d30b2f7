"""A model that learns from a fixed set of rows: a critic from stored rollouts, a reward model from pairs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from tether.batch import TrainBatch
from tether.keyed_random import held_out_rows
from tether.training import Learner, UpdatePlan

Prompt = TypeVar("Prompt", bound=Hashable)


def held_out_prompts(prompts: Iterable[Prompt], share: float, seed: int) -> set[Prompt]:
    """Pick the prompts that are kept apart: at least one, and not all.

    Raises:
        ValueError: there is one prompt only.
    """
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) < 2:
        raise ValueError("all rows are of one prompt, so none can be held out; give rows of more prompts")
    return {distinct[number] for number in held_out_rows(len(distinct), share, seed)}


@dataclass(frozen=True)
class Pretraining:
    """A model, what it learns from, and what it is measured on."""

    learner: Learner[TrainBatch, Any]
    learned: TrainBatch
    held_out: TrainBatch
    plan: UpdatePlan
    """Epochs and mini-batches over all of `learned`."""
    measure: Callable[[Any, TrainBatch], dict[str, float]]
    """(outputs, rows) -> metrics of the held-out rows."""
    role: str
    """Metrics without a group of their own get this one."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all epochs."""
        return sum(1 for epoch in range(self.plan.epochs) for _ in self._mini_batches(epoch))

    def run(self, done: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
        """Train; yields (optimizer step, metrics) after each step, and step 0 before the first.

        What `measure` gives is there before the first step and after each epoch.

        Args:
            done: steps that the model and its optimizer have taken already; they are passed over.
        """
        if not done:
            yield 0, self._measured()
        step = 0
        for epoch in range(self.plan.epochs):
            mini_batches = list(self._mini_batches(epoch))
            for rows in mini_batches:
                if step < done:
                    step += 1
                    continue
                once = UpdatePlan(mini_batch_rows=len(rows))
                updated = self.learner.engine.update(self.learned[rows], self.learner.loss, once, step)
                step += 1
                metrics = {name if "/" in name else f"{self.role}/{name}": x for name, x in updated.metrics.items()}
                yield step, metrics | (self._measured() if rows is mini_batches[-1] else {})

    def _mini_batches(self, epoch: int) -> Iterator[Tensor]:
        return replace(self.plan, shuffle=True).mini_batches(len(self.learned), 0, epoch)

    def _measured(self) -> dict[str, float]:
        return self.measure(self.learner.infer(self.held_out), self.held_out)
