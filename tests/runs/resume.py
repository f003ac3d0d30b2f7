"""Whether a run that was stopped and goes on is the run that was never stopped, for any options."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tests.runs.tiny_run import base_overrides, measured, same, train, weights
from tether.checkpoints import load_state
from tether.config import load_config
from tether.metrics.loggers.jsonl import read_samples
from tether.text.build import build_run


def assert_resume_is_exact(
    inputs: Path,
    folder: Path,
    overrides: Sequence[str],
    *,
    stop_after: int = 1,
    total: int = 3,
    must_change: Sequence[str] = (),
) -> None:
    """Train straight and in two parts; every weight, optimizer state, metric and sample must be the same bit for bit.

    Args:
        inputs: of the run (`tests.runs.tiny_run.write_inputs`).
        folder: for both runs.
        overrides: what is to be tested, over `base_overrides`; the estimator among them.
        stop_after: training step after which the second run is interrupted.
        total: training steps.
        must_change: metrics that differ in every step: without the state that is tested, they could not be right.
    """
    options = [*overrides, f"trainer.total_training_steps={total}", f"trainer.save_freq={total}"]
    whole = train([*base_overrides(inputs, folder / "whole"), *options])
    parts = train_in_two_parts([*base_overrides(inputs, folder / "parts"), *options], stop_after)
    metrics = measured(whole)
    for name in must_change:
        values = [metrics[step][name] for step in range(1, total + 1)]
        assert len(set(values)) == total, f"{name} would not show a lost state: {values}"
    assert metrics.keys() == measured(parts).keys()
    assert same(metrics, measured(parts))
    assert read_samples(whole) == read_samples(parts)
    assert_same_end(whole / f"global_step_{total}", parts / f"global_step_{total}")


def train_in_two_parts(overrides: list[str], stop_after: int) -> Path:
    """Interrupt a run after a step, and start it again as in a new process: with other global random states."""
    run = build_run(load_config(None, overrides))
    try:
        run.trainer.fit(interrupted=lambda: run.trainer.step_number == stop_after)
    finally:
        run.close()
    random.seed(stop_after)
    np.random.seed(stop_after)
    torch.manual_seed(stop_after)
    return train(overrides)


def assert_same_end(one: Path, other: Path) -> None:
    """Two checkpoints hold the same weights and states, bit for bit."""
    roles = ["actor", "critic"] if (one / "critic").exists() else ["actor"]
    for role in roles:
        assert same(weights(one, role), weights(other, role)), role
        assert same(state(one, role), state(other, role)), role
    ones, others = state(one, "trainer"), state(other, "trainer")
    different = {key for key in ones.keys() | others.keys() if not same(ones.get(key), others.get(key))}
    assert not different, {key: (ones.get(key), others.get(key)) for key in different}


def state(checkpoint: Path, name: str) -> dict[str, object]:
    """The training state of "actor", "critic" or "trainer"."""
    return load_state(checkpoint / "training" / f"{name}.pt")
