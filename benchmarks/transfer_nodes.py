"""Time in which servers on two nodes get new weights, beside one copy of the weights.

    python -m benchmarks.transfer_nodes
    python -m benchmarks.transfer_nodes --write docs/evidence/servers.md

Two raylets on this machine are the nodes, each with a stand-in of vLLM's server, which copies what arrives into its
model. A plain copy of as many bytes, its way into the object store alone, an update of the server on the node of the
weights, and one of both servers take turns; the fastest of each counts, as other work on the machine only adds to it.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from ray.cluster_utils import Cluster
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.overhead import SERVED
from benchmarks.resumable import write_between
from benchmarks.speed.machine import machine_line
from benchmarks.speed.table import grid
from benchmarks.speed.timing import seconds
from tests.distributed.parts import ray_group
from tests.text.servers.stand_in import environment
from tests.tiny import save_tiny
from tether.distributed.handles import WeightsOnRanks
from tether.runtime.ranks import Pool
from tether.text.servers import ServedPolicy, Traffic
from tether.text.servers.hosted import HostedServer, host_server
from tether.text.servers.protocol import NamedUpdate
from tether.text.servers.vllm_api import Vllm, launch_of

BEGIN, END = "<!-- transfer:begin -->", "<!-- transfer:end -->"
HEAD = ("", "copy", "update", "ratio", "goal")
GOAL, RUNS = 2.5, 9
STORE = 512 << 20
"""Bytes of each node's object store, all of which is used before updates count: new memory costs page faults."""
HEAD_NAME = "lm_head.weight"


class Policy:
    """The weights on a rank."""

    def __init__(self, folder: Path) -> None:
        self._weights = list(AutoModelForCausalLM.from_pretrained(folder).state_dict().items())
        self._copy = [torch.zeros_like(tensor) for _, tensor in self._weights]

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, as an engine does."""
        yield from self._weights

    def nbytes(self) -> int:
        """Return the bytes of the weights that are sent."""
        return sum(tensor.nbytes for name, tensor in self._weights if name != HEAD_NAME)

    def copy(self) -> float:
        """Return the seconds of a copy of them into memory that was used before."""
        pairs = [(new, old) for new, (name, old) in zip(self._copy, self._weights, strict=True) if name != HEAD_NAME]
        return seconds(lambda: [new.copy_(old) for new, old in pairs])


def make(folder: Path) -> Mapping[str, Any]:
    """Return the components of a rank."""
    return {"policy": Policy(folder)}


def measure(folder: Path) -> list[Sequence[str]]:
    """Return the rows of the table."""
    save_tiny(folder / "model", "qwen2", **SERVED)
    api = Vllm(ServedPolicy("qwen2", AutoConfig.from_pretrained(folder / "model").vocab_size))
    options = {"model": str(folder / "model"), "dtype": "float32", "load_format": "dummy", "max_model_len": 64}
    python = environment(folder / "vllm", is_fork=False) / "bin/python"
    traffic = Traffic(torch.float32, 512 << 20, frozenset([HEAD_NAME]), max_num_seqs=8, sleeps=False)
    cluster = Cluster()
    for node in range(2):
        more = {"include_dashboard": False} if node == 0 else {}
        cluster.add_node(num_cpus=1, object_store_memory=STORE, **more)
    group: Any = ray_group([Pool(2, 1)], "cpu", 2, folder, options={"address": cluster.address})
    servers = []
    try:
        group.build(make, folder / "model")
        for rank in range(2):
            launch = launch_of(python, folder / f"vllm-{rank}.log", options, {})
            companion = group.companion(rank, 8, host_server, api, launch, 120, f"node-{rank}")
            servers.append(HostedServer(api, companion, f"vllm-{rank}", 120))
        for server in servers:
            server.wait_ready()

        def load(to: Sequence[HostedServer], run: int) -> None:
            weights = WeightsOnRanks(group, "policy", None)
            assert not HostedServer.load(to, NamedUpdate(weights, f"run-{len(to)}-{run}", "run", traffic))

        sizes = group.call("policy", "nbytes", [(), ()])
        sides = {
            "copy": lambda _: float(group.call("policy", "copy", [(), None])[0]),
            "store": lambda _: seconds(lambda: deque(WeightsOnRanks(group, "policy", None).shared(), maxlen=0)),
            "one": lambda run: seconds(partial(load, servers[:1], run)),
            "two": lambda run: seconds(partial(load, servers, run)),
        }
        taken: dict[str, list[float]] = {name: [] for name in sides}
        warm_up = STORE // sizes[0] + 1
        for run in range(warm_up + RUNS):
            for name, side in sides.items():
                taken[name].append(side(run))
        fastest = {name: min(times[warm_up:]) for name, times in taken.items()}
    finally:
        for server in servers:
            server.stop()
        group.close()
        cluster.shutdown()
    shown = {
        "store": "the object store alone",
        "one": "the server on the node of the weights",
        "two": "servers on two nodes",
    }
    return [
        (
            f"{sizes[0] >> 20} MiB of weights to {what}",
            f"{1e3 * fastest['copy']:.0f} ms",
            f"{1e3 * fastest[name]:.0f} ms",
            f"{fastest[name] / fastest['copy']:.1f}",
            f"at most {GOAL}" if name == "two" else "-",
        )
        for name, what in shown.items()
    ]


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also put the table between the marks of this page")
    arguments = parser.parse_args()
    with TemporaryDirectory() as scratch:
        table = grid(HEAD, measure(Path(scratch)))
    lines = [*table, "", f"{machine_line()}; the fastest of {RUNS} updates that take turns."]
    print("\n".join(lines))
    if arguments.write:
        write_between(arguments.write, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    main()
