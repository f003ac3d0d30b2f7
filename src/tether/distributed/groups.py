"""The processes of a run, one per device, and the placement of models on them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tether.config import RunConfig, device_count, placed, pools
from tether.distributed import AllRanks, Group
from tether.runtime.install import pip_install
from tether.runtime.objects import is_object
from tether.runtime.ranks import Deadlines, Pool


@dataclass(frozen=True)
class RankGroups:
    """The processes of a run, in groups of communicating ranks."""

    all_ranks: AllRanks
    """The group of all ranks."""
    of: Mapping[str, Group]
    """Name of each model -> its group; models on the same devices share a group."""

    def build(self, factory: Callable[..., Mapping[str, Any]], *arguments: Any) -> None:
        """Build the models of each group with a factory, whose last argument is their names."""
        for group in {id(group): group for group in self.of.values()}.values():
            group.build(factory, *arguments, frozenset(name for name, mine in self.of.items() if mine is group))


def build_groups(config: RunConfig, device: torch.device, logs: Path, resources: ExitStack) -> RankGroups | None:
    """Start the processes of a run, which `resources` closes; return None for a single device.

    Raises:
        ValueError: Ray is not installed, or there are too few devices.
    """
    devices = pools(config)
    if device_count(config) == 1:
        return None
    key, count = _key(devices)
    if is_object(config.actor_rollout_ref.model.path):
        raise ValueError(f"{key}: a model that is an object of this process has no other device. Save it first")
    if device.type != "cuda" and config.trainer.device != "cpu":
        raise ValueError(
            f"{key}={count}: this machine has no CUDA device. Set it to 1, or trainer.device=cpu "
            f"for {device_count(config)} processes on its cores"
        )
    ranks_of = placed(config)
    all_ranks = _start_group(
        devices,
        device.type,
        config.trainer.num_threads,
        logs,
        together=sorted({*ranks_of.values()}, key=lambda ranks: ranks.start),
        options=config.ray_kwargs.ray_init,
        deadlines=Deadlines(
            start=config.trainer.ray_wait_register_center_timeout,
            silence=config.trainer.max_silence,
            collective=config.actor_rollout_ref.nccl_timeout,
        ),
    )
    resources.callback(all_ranks.close)
    groups = {ranks: all_ranks.some(ranks) for ranks in ranks_of.values()}
    return RankGroups(all_ranks, {name: groups[ranks] for name, ranks in ranks_of.items()})


def _key(devices: tuple[Pool, ...]) -> tuple[str, int]:
    """Return the key that configures several devices, and its value."""
    for pool in devices:
        if pool.nodes > 1:
            return f"{pool.section}.nnodes", pool.nodes
    largest = max(devices, key=lambda pool: pool.per_node)
    return f"{largest.section}.n_gpus_per_node", largest.per_node


def _start_group(devices: tuple[Pool, ...], device: str, threads: int | None, logs: Path, **options: Any) -> Any:
    """Start a `tether.distributed.ray_group.RayGroup`, which requires an extra."""
    key, count = _key(devices)
    try:
        execution = importlib.import_module("tether.distributed.ray_group")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{key}={count}: several devices need the package {error.name}, which is not installed. Run: "
            f"{pip_install('ray')}, or set {key}=1."
        ) from error
    available, requested = torch.cuda.device_count(), sum(pool.size for pool in devices)
    local = execution.is_local(max(pool.nodes for pool in devices), options["options"])
    if device == "cuda" and requested > available and local:
        raise ValueError(f"{key}={count}: this machine has {available} CUDA devices. Set it to at most {available}")
    return execution.RayGroup(devices, device, threads, logs, **options)
