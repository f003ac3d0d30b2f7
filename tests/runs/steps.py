"""The first steps of a run, done by hand on all of its real parts: nothing is saved, evaluated or logged."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tether.batch import TrainBatch
from tether.config import load_config
from tether.loop.loop import Trainer
from tether.text.build import Run, build_run


@dataclass(frozen=True)
class Stepped:
    """What some steps did."""

    trainer: Trainer
    metrics: list[dict[str, float]]
    batches: list[TrainBatch]
    """Of each step, with its advantages."""


@contextmanager
def built(overrides: Sequence[str]) -> Iterator[Run]:
    """Build a run, and close it at the end."""
    run = build_run(load_config(None, overrides))
    try:
        yield run
    finally:
        run.close()


def recorded_batches(trainer: Trainer) -> list[TrainBatch]:
    """Return a list to which each later step appends its batch once that has advantages."""
    batches: list[TrainBatch] = []
    estimate = trainer.estimate_advantages

    def recording(batch: TrainBatch) -> dict[str, float]:
        metrics = estimate(batch)
        batches.append(batch.clone())
        return metrics

    trainer.estimate_advantages = recording
    return batches


def stepped(overrides: Sequence[str], count: int = 1) -> Stepped:
    """Build a run and do its first steps."""
    with built(overrides) as run:
        batches = recorded_batches(run.trainer)
        run.trainer.rollouts.begin(0)
        return Stepped(run.trainer, [run.trainer.advance() for _ in range(count)], batches)


def first_step(overrides: Sequence[str]) -> dict[str, float]:
    """Return the metrics of the first step of a run."""
    return stepped(overrides).metrics[0]
