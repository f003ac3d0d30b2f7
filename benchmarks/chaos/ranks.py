"""A run on two nodes whose ranks, nodes, disk and driver fail at random moments, beside one that is undisturbed.

Two raylets beside the head are the nodes, with a rank each. One run meets all faults, one after the other; where a
fault ends the command, the same command is given again.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ray.cluster_utils import Cluster

from benchmarks.chaos.soak import MARK, Fault, Result, Soak, disturb, kill_driver, left_running, names_of, steps_of
from tests.distributed.processes import processes_of
from tests.runs.tiny_run import GAE, base_overrides, write_inputs

SILENCE = 15
"""Seconds until a rank that is stopped is given up."""
PAUSE = 3.0


def _kill(soak: Soak) -> None:
    os.kill(soak.one(), signal.SIGKILL)


def _stop(soak: Soak) -> None:
    os.kill(soak.one(), signal.SIGSTOP)


def _pause(soak: Soak) -> None:
    process = soak.one()
    os.kill(process, signal.SIGSTOP)
    time.sleep(PAUSE)
    os.kill(process, signal.SIGCONT)


def _fill_disk(soak: Soak) -> None:
    """Let files end early for some steps, which save no checkpoint, or end the command if it has none."""
    process = soak.one()
    before = resource.prlimit(process, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    time.sleep(PAUSE)
    with suppress(ProcessLookupError):
        resource.prlimit(process, resource.RLIMIT_FSIZE, before)


def _remove_node(cluster: Cluster, soak: Soak) -> None:
    nodes = [node for node in cluster.list_all_nodes() if not node.head]
    cluster.remove_node(soak.noise.choice(nodes), allow_graceful=False)
    cluster.add_node(num_cpus=1)


def measure(folder: Path, faults: int, seed: int = 0) -> Result:
    """Disturb a run so many times, each kind of fault about as often."""
    os.environ |= {MARK: "1", "RAY_worker_niceness": "0"}
    inputs, noise = write_inputs(folder / "inputs"), random.Random(seed)
    with _nodes() as cluster:
        kinds: Mapping[str, Fault] = {
            "`kill -9` of a rank": _kill,
            "a rank is stopped (SIGSTOP)": _stop,
            f"a rank is stopped for {PAUSE:g} s, and goes on": _pause,
            "`kill -9` of the driver": kill_driver,
            f"the disk is full for one rank for {PAUSE:g} s": _fill_disk,
            "a node is removed, with its rank": partial(_remove_node, cluster),
        }
        names = names_of(kinds, faults, noise)
        disturbed, whole = (
            (folder / name, _overrides(inputs, folder / name, cluster, steps_of(names)))
            for name in ("disturbed", "whole")
        )
        result = disturb(Soak(*disturbed, noise, processes_of, 2), kinds, names, whole)
    return replace(result, left=left_running())


@contextmanager
def _nodes() -> Iterator[Cluster]:
    cluster = Cluster()
    cluster.add_node(num_cpus=0, include_dashboard=False)
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def _overrides(inputs: Path, folder: Path, cluster: Cluster, steps: int) -> list[str]:
    return [
        *base_overrides(inputs, folder), *GAE, f"trainer.total_training_steps={steps}", "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2", "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.preflight=False",
        f"trainer.max_restarts={steps}", f"trainer.max_silence={SILENCE}", "trainer.logger=file",
        f"ray_kwargs.ray_init={{address: '{cluster.address}'}}",
    ]  # fmt: skip
