"""Runs that are killed by SIGKILL at random moments, compared bit for bit with a run that never was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.runs.loops import Control, Loop, Text, contents, train_apart, train_killed
from tests.runs.tiny_run import write_inputs

STATEFUL = "tests.control.envs.stateful"
SPARE_STEPS = 5
"""Steps beyond one per kill, so that the run cannot end before its last kill."""


@dataclass(frozen=True)
class Case:
    """A kind of run, and how often it is killed for each hundred kills."""

    name: str
    options: tuple[str, ...]
    share: int
    text: bool = False


GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")
PROCESSES = ("env.train.vectorization=subprocess", "env.train.num_workers=2")


def _wrapped(wrapper: str) -> str:
    return f"env.train.wrappers=[{STATEFUL}:{wrapper}]"


CASES = (
    Case("text: PPO with a critic, a reference and GAE", (), 20, text=True),
    Case("text: GRPO", GRPO, 10, text=True),
    Case("control: CartPole", (), 10),
    Case("control: a wrapper that draws from np.random, in processes", (_wrapped("DrawsNumpy"), *PROCESSES), 10),
    Case("control: a wrapper that draws from random", (_wrapped("DrawsPython"),), 10),
    Case("control: a wrapper that draws from torch", (_wrapped("DrawsTorch"),), 10),
    Case("control: a wrapper with generators of its own", (_wrapped("OwnGenerators"),), 10),
    Case("control: a wrapper with counters and a history", (_wrapped("Counts"),), 10),
    Case("control: a wrapper with get_state and set_state", (_wrapped("GivesItsState"),), 10),
)


@dataclass(frozen=True)
class Result:
    """Kills of one case, and in how many bits the killed run ended apart from the other."""

    case: Case
    kills: int
    survived: int
    bits_lost: int
    seconds: float


def measure(folder: Path, kills: int) -> Iterator[Result]:
    """Kill every case its share of `kills` times."""
    inputs = write_inputs(folder / "inputs")
    for number, case in enumerate(CASES):
        loop: Loop = Text(inputs) if case.text else Control()
        count = max(1, round(case.share * kills / 100))
        yield _measure(case, loop, folder / str(number), count)


def _measure(case: Case, loop: Loop, folder: Path, kills: int) -> Result:
    began, total = time.perf_counter(), kills + SPARE_STEPS
    more = [*case.options, f"trainer.total_training_steps={total}", "trainer.save_freq=1"]
    train_apart(loop, loop.overrides(folder / "whole", *more))
    try:
        train_killed(loop, loop.overrides(folder / "killed", *more), folder / "killed", kills, seed=kills)
    except AssertionError:  # a process that did not resume, or a run that did not end
        return Result(case, kills, 0, 0, time.perf_counter() - began)
    last = f"global_step_{total}"
    lost = different_bits(contents(folder / "whole" / last), contents(folder / "killed" / last))
    return Result(case, kills, kills, lost, time.perf_counter() - began)


def different_bits(one: Any, other: Any) -> int:
    """How many bits of two nested values differ; where their shapes do, all bits of the larger one."""
    if isinstance(one, dict) and isinstance(other, dict):
        return sum(different_bits(one.get(key), other.get(key)) for key in {**one, **other})
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return sum(different_bits(a, b) for a, b in zip(one, other, strict=True))
    left, right = _bytes(one), _bytes(other)
    if len(left) != len(right):
        return 8 * max(len(left), len(right))
    return int(np.unpackbits(left ^ right).sum())


def _bytes(value: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().flatten().view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        return np.frombuffer(value.tobytes(), np.uint8)
    return np.frombuffer(repr(value).encode(), np.uint8)
