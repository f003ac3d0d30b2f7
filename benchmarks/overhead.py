"""Overhead of several processes: python -m benchmarks.overhead --write docs/evidence/several-devices.md

Steps of PPO with a small policy and critic in float32 on one rank under Ray, and on two, take turns with those of one
process; so do weights that go from one rank to another through Ray's object store, and to a vLLM server where its
environment exists (tether setup vllm), with a plain copy of as many bytes. Every rank has one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.resumable import write_between
from benchmarks.speed.machine import machine_line
from benchmarks.speed.runs import one_step
from benchmarks.speed.table import grid
from benchmarks.speed.timing import seconds, take_turns
from tests.runs.tiny_run import base_overrides, rows, write_inputs, write_jsonl
from tests.text.servers.bench import vllm_python
from tests.tiny import save_tiny
from tether.config import load_config
from tether.distributed import StoredWeights, groups
from tether.distributed.handles import Replicas
from tether.distributed.ray_group import RayGroup
from tether.loop.loop import Trainer
from tether.runtime.ranks import Pool
from tether.text.build import build_run
from tether.text.servers import InferenceServer, ServedPolicy
from tether.text.servers.vllm_api import Vllm, launch_of
from tether.text.sharded import ShardedEngine, ShardedSampler

BEGIN, END = "<!-- overhead:begin -->", "<!-- overhead:end -->"
SERVED_BEGIN, SERVED_END = "<!-- served:begin -->", "<!-- served:end -->"
HEAD = ("", "one process", "Ray", "ratio", "goal")
SERVED_WAYS = ("tensor", "distributed", "disk")
PROMPTS = 4
SIZES = {"few": (4, 16, 4), "many": (8, 64, 32)}
"""Tokens in a pass: responses per prompt, their tokens, and rows of a micro-batch."""
RUNS = 9
MODEL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
SERVED: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
TENSORS, WIDTH = 32, 1 << 10
"""Of the weights that are moved: 128 MiB in 32 matrices."""
USED = 8
"""Transfers until all of Ray's store was used once, 1 GiB, as it is after some updates of a run."""
GOAL_STEP, GOAL_TRANSFER = 1.10, 2.0


def write_run(folder: Path) -> Path:
    """Inputs of the run; returns their folder."""
    write_inputs(folder)
    save_tiny(folder / "model", **MODEL)
    write_jsonl(folder / "train.jsonl", rows(count=16 * PROMPTS))
    return folder


@contextmanager
def started(inputs: Path, ranks: int | None, size: tuple[int, int, int]) -> Iterator[tuple[Trainer, float]]:
    """A run and the seconds in which it was built; None ranks: in this process. `size` is one of `SIZES`."""
    samples, new_tokens, micro_rows = size
    folder = inputs / f"run_{ranks}_{new_tokens}"
    given = [
        *base_overrides(inputs, folder),
        "algorithm.adv_estimator=gae",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_response_length={new_tokens}",
        f"actor_rollout_ref.rollout.n={samples}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro_rows // (ranks or 1)}",
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


def compare_steps(inputs: Path, ranks: int, size: tuple[int, int, int]) -> tuple[float, float, float, float]:
    """Median seconds of a step in one process and on ranks, which take turns, and seconds in which each was built."""
    with started(inputs, None, size) as (one, start_one), started(inputs, ranks, size) as (other, start_other):
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

    def load(self, version: int, weights: StoredWeights) -> int:
        """Copy stored weights into those here, as a sampler does; returns their bytes."""
        for name, tensor in weights.update(version).tensors:
            self._weights[int(name)].copy_(tensor)
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

        actor = ShardedEngine[Any](one, "holder", Replicas.contiguous(1, 1))
        sampler = ShardedSampler(two, "holder", frozenset(), None, 1)
        sides = {
            "copy": lambda _: float(two.call("holder", "copy", [()])[0]),
            "transfer": lambda _: seconds(lambda: sampler.load_weights(actor.export())),
        }
        medians = take_turns(sides, RUNS, warm_up=USED)
        moved = int(group.transfers.take()["transfer/weights_bytes"]) // (USED + RUNS)
        return medians["copy"], medians["transfer"], moved
    finally:
        group.close()


def compare_served(folder: Path, python: Path) -> dict[str, tuple[float, float, int]]:
    """By way: median seconds of a plain copy and of an update of vLLM's weights, which take turns, and the bytes."""
    save_tiny(folder / "served", "qwen2", **SERVED)
    model = AutoModelForCausalLM.from_pretrained(folder / "served")
    given = {"model": str(folder / "served"), "dtype": "float32", "load_format": "dummy", "enforce_eager": True,
             "max_model_len": 64, "gpu_memory_utilization": 0.1}  # fmt: skip
    alone = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    api = Vllm(ServedPolicy("qwen2", model.config.vocab_size))
    server = InferenceServer(api, launch_of(python, folder / "vllm.log", given, alone), 900)

    def update(way: str, run: int) -> float:
        server.api = replace(api, transfer=way)
        return seconds(lambda: server.load_weights(f"{way}-{run}", weights, torch.float32, bucket))

    weights = [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]
    there = [torch.zeros_like(tensor) for _, tensor in weights]
    bucket = 512 << 20
    try:
        server.wait_ready()
        sides = {
            "copy": lambda _: seconds(
                lambda: [new.copy_(tensor) for new, (_, tensor) in zip(there, weights, strict=True)]
            ),
            **{way: partial(update, way) for way in SERVED_WAYS},
        }
        medians = take_turns(sides, RUNS, warm_up=1)
    finally:
        server.stop()
    nbytes = sum(tensor.nbytes for _, tensor in weights)
    return {way: (medians["copy"], medians[way], nbytes) for way in SERVED_WAYS}


def measure() -> list[str]:
    """Lines of the table."""
    shown: list[Sequence[str]] = []
    with TemporaryDirectory() as scratch:
        inputs = write_run(Path(scratch))
        for ranks in (1, 2):
            name = f"{ranks} rank{'s' * (ranks > 1)} under Ray"
            goal = f"at most {GOAL_STEP:.2f}" if ranks == 1 else "-"
            for passes, size in SIZES.items():
                one, other, start_one, start_other = compare_steps(inputs, ranks, size)
                what = f"a step, {name}, {passes} tokens in a pass"
                shown.append((what, f"{one:.2f} s", f"{other:.2f} s", f"{other / one:.2f}", goal))
                print(shown[-1], flush=True)
            shown.append((f"until it is built, {name}", f"{start_one:.1f} s", f"{start_other:.1f} s", "-", "-"))
        moved = [("another rank", compare_transfers(inputs))]
        if python := vllm_python():
            moved += served(inputs, python)
    return grid(HEAD, [*shown, *(row_of(*one) for one in moved)])


def served(folder: Path, python: Path) -> list[tuple[str, tuple[float, float, int]]]:
    """Transfers to a vLLM server, one a way."""
    return [(f"a vLLM server ({way})", found) for way, found in compare_served(folder, python).items()]


def row_of(where: str, measured: tuple[float, float, int]) -> tuple[str, ...]:
    """The row of a transfer."""
    copy, transfer, nbytes = measured
    what = f"{nbytes >> 20} MiB of weights to {where}, beside a copy"
    goal = f"at most {GOAL_TRANSFER:.0f}"
    return (what, f"{1e3 * copy:.0f} ms", f"{1e3 * transfer:.0f} ms", f"{transfer / copy:.1f}", goal)


def measure_served() -> list[str]:
    """Lines of the rows of vLLM alone."""
    python = vllm_python()
    assert python is not None, "tether setup vllm makes vLLM's environment"
    with TemporaryDirectory() as scratch:
        return grid(("", "copy", "update", "ratio", "goal"), [row_of(*one) for one in served(Path(scratch), python)])


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also put the table between the marks of this page")
    parser.add_argument("--served", action="store_true", help="only the rows of vLLM, for a place of their own")
    given = parser.parse_args()
    begin, end = (SERVED_BEGIN, SERVED_END) if given.served else (BEGIN, END)
    lines = [
        *(measure_served() if given.served else measure()),
        "",
        f"{machine_line()}; medians of {RUNS} steps that take turns.",
    ]
    print("\n".join(lines))
    if given.write:
        write_between(given.write, begin, end, "\n".join(lines))


if __name__ == "__main__":
    main()
