"""Training on a fixed set of rows: a critic on stored rollouts, or a reward model on pairs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from tether.batch import TrainBatch
from tether.keyed_random import held_out_rows
from tether.loop.engine import Learner, UpdatePlan

Prompt = TypeVar("Prompt", bound=Hashable)


def held_out_prompts(prompts: Iterable[Prompt], share: float, seed: int) -> set[Prompt]:
    """Select the held-out prompts: at least one, and not all of them.

    Raises:
        ValueError: there is only one prompt.
    """
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) < 2:
        raise ValueError("all rows have the same prompt, so none can be held out; provide rows of more prompts")
    return {distinct[index] for index in held_out_rows(len(distinct), share, seed)}


@dataclass(frozen=True)
class Pretraining:
    """Trains a model on rows and measures it on held-out ones."""

    learner: Learner[TrainBatch, Any]
    learned: TrainBatch
    held_out: TrainBatch
    plan: UpdatePlan
    """Epochs and mini-batches over all of `learned`."""
    measure: Callable[[Any, TrainBatch], dict[str, float]]
    """Returns metrics of the held-out rows; called with (outputs, rows)."""
    role: str
    """Prefix of metrics that have none."""

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps over all epochs."""
        return sum(1 for epoch in range(self.plan.epochs) for _ in self._mini_batches(epoch))

    def run(self, done: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
        """Train and yield (optimizer step, metrics) before the first step, as step 0, and after each step.

        The metrics of `measure` are included before the first step and after each epoch.

        Args:
            done: number of steps that model and optimizer have already made; these are skipped.
        """
        if not done:
            yield 0, self._held_out_metrics()
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
                yield step, metrics | (self._held_out_metrics() if rows is mini_batches[-1] else {})

    def _mini_batches(self, epoch: int) -> Iterator[Tensor]:
        return replace(self.plan, shuffle=True).mini_batches(len(self.learned), 0, epoch)

    def _held_out_metrics(self) -> dict[str, float]:
        return self.measure(self.learner.infer(self.held_out), self.held_out)
