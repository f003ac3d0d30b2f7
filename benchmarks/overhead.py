"""Overhead of several processes: python -m benchmarks.overhead --write docs/scaling-out.md

Steps of PPO with a small policy and critic in float32 on one rank under Ray, and on two, take turns with those of one
process; so do weights that go from one rank to another through Ray's object store with a plain copy of as many bytes.
Every rank has one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.resumable import write_between
from benchmarks.speed.machine import machine_line
from benchmarks.speed.runs import one_step
from benchmarks.speed.table import grid
from benchmarks.speed.timing import seconds, take_turns
from tests.tiny import save_tiny
from tests.trainer.tiny_run import base_overrides, rows, write_inputs, write_jsonl
from tether.assembly import groups
from tether.assembly.run import build_run
from tether.config import load_config
from tether.execution import StoredWeights
from tether.execution.ray_group import RayGroup
from tether.runtime.ranks import Pool
from tether.trainer.loop import Trainer

BEGIN, END = "<!-- overhead:begin -->", "<!-- overhead:end -->"
PROMPTS, SAMPLES, NEW_TOKENS = 4, 4, 16
RUNS = 3
MODEL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
TENSORS, WIDTH = 32, 1 << 10
"""Of the weights that are moved: 128 MiB in 32 matrices."""
GOAL_STEP, GOAL_TRANSFER = 1.10, 2.0


def write_run(folder: Path) -> Path:
    """Inputs of the run; returns their folder."""
    write_inputs(folder)
    save_tiny(folder / "model", **MODEL)
    write_jsonl(folder / "train.jsonl", rows(count=16 * PROMPTS))
    return folder


@contextmanager
def started(inputs: Path, ranks: int | None) -> Iterator[tuple[Trainer, float]]:
    """A run and the seconds in which it was built; None ranks: in this process."""
    folder = inputs / f"run_{ranks}"
    given = [
        *base_overrides(inputs, folder),
        "algorithm.adv_estimator=gae",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_response_length={NEW_TOKENS}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        f"trainer.num_threads={ranks or 1}",
        f"trainer.n_gpus_per_node={ranks or 1}",
        "trainer.total_training_steps=1000",
        "trainer.preflight=False",
    ]
    began = time.perf_counter()
    with patch.object(groups, "device_count", lambda config: 2 if ranks else 1):  # one rank needs no Ray otherwise
        run = build_run(load_config(None, given))
    spent = time.perf_counter() - began
    try:
        yield run.trainer, spent
    finally:
        run.close()


def compare_steps(inputs: Path, ranks: int) -> tuple[float, float, float, float]:
    """Median seconds of a step in one process and on ranks, which take turns, and seconds in which each was built."""
    with started(inputs, None) as (one, start_one), started(inputs, ranks) as (other, start_other):
        torch.set_num_threads(1)  # the second run has set as many as all of its ranks have
        sides = {
            "one": lambda _: seconds(lambda: one_step(one)),
            "ranks": lambda _: seconds(lambda: one_step(other)),
        }
        medians = take_turns(sides, RUNS, warm_up=1)
    return medians["one"], medians["ranks"], start_one, start_other


class Holder:
    """Weights on a rank."""

    def __init__(self) -> None:
        self._weights = [torch.ones(WIDTH, WIDTH) for _ in range(TENSORS)]

    def whole_weights(self) -> list[tuple[str, Tensor]]:
        """See `Worker`."""
        return [(str(number), tensor) for number, tensor in enumerate(self._weights)]

    def take(self, weights: StoredWeights) -> int:
        """Copy stored weights into those here, as a sampler does; returns their bytes."""
        for mine, (_, tensor) in zip(self._weights, weights.update(1).tensors, strict=True):
            mine.copy_(tensor)
        return weights.nbytes

    def copy(self) -> float:
        """Seconds of a plain copy of as many bytes."""
        there = [torch.zeros_like(tensor) for tensor in self._weights]
        return seconds(lambda: [new.copy_(tensor) for new, tensor in zip(there, self._weights, strict=True)])


def make_holder() -> Mapping[str, Any]:
    """The model of each rank."""
    return {"holder": Holder()}


def compare_transfers(folder: Path) -> tuple[float, float, int]:
    """Median seconds of a plain copy and of a transfer from one rank to another, and the bytes."""
    group = RayGroup([Pool(1, 1), Pool(1, 1, "rollout")], "cpu", 2, folder, together=[range(1), range(1, 2)])
    try:
        one, two = group.some(range(1)), group.some(range(1, 2))
        one.build(make_holder)
        two.build(make_holder)

        def transfer() -> int:
            return int(two.call("holder", "take", [(one.share_weights("holder"),)])[0])

        sides = {
            "copy": lambda _: float(two.call("holder", "copy", [()])[0]),
            "transfer": lambda _: seconds(transfer),
        }
        medians = take_turns(sides, RUNS, warm_up=1)
        return medians["copy"], medians["transfer"], transfer()
    finally:
        group.close()


def measure() -> list[str]:
    """Lines of the table."""
    shown: list[Sequence[str]] = []
    with TemporaryDirectory() as scratch:
        inputs = write_run(Path(scratch))
        for ranks in (1, 2):
            one, other, start_one, start_other = compare_steps(inputs, ranks)
            name = f"{ranks} rank{'s' * (ranks > 1)} under Ray"
            goal = f"at most {GOAL_STEP:.2f}" if ranks == 1 else "-"
            shown.append((f"a step, {name}", f"{one:.2f} s", f"{other:.2f} s", f"{other / one:.2f}", goal))
            shown.append((f"until it is built, {name}", f"{start_one:.1f} s", f"{start_other:.1f} s", "-", "-"))
            print(shown[-2:], flush=True)
        copy, transfer, size = compare_transfers(inputs)
    what = f"{size >> 20} MiB of weights to another rank, beside a copy"
    goal = f"at most {GOAL_TRANSFER:.0f}"
    shown.append((what, f"{1e3 * copy:.0f} ms", f"{1e3 * transfer:.0f} ms", f"{transfer / copy:.1f}", goal))
    return grid(("", "one process", "Ray", "ratio", "goal"), shown)


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also put the table between the marks of this page")
    given = parser.parse_args()
    lines = [*measure(), "", f"{machine_line()}; medians of {RUNS} steps that take turns."]
    print("\n".join(lines))
    if given.write:
        write_between(given.write, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    main()
