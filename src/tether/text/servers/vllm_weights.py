"""The methods of sending weights to a vLLM server (`actor_rollout_ref.rollout.weight_transfer`) in an open update.

`tether.text.servers.inside` has the receiving side, which gets the location of tensors and selects its shard of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tether.text.servers import CPU, BroadcastGroup, Connections, WeightPayload, gpu_of, is_local, shared_file, this_gpu

Transfer = Callable[[Connections, str, WeightPayload, float], None]


def _by_disk(http: Connections, name: str, weights: WeightPayload, timeout: float) -> None:
    """Send chunks as files in memory."""
    for chunk in weights.chunks():
        with shared_file(chunk) as path:
            _update(http, {"path": path}, timeout)


def _by_tensor(http: Connections, name: str, weights: WeightPayload, timeout: float) -> None:
    """Send chunks in a buffer that the workers have open, in this machine's memory or in that of a GPU."""

    def shared_device(device: torch.device) -> torch.device:
        is_shared = device.type == "cuda" and all(
            gpu_of(device) in worker["gpus"] for worker in _workers(http, timeout)
        )
        return device if is_shared else CPU

    for staged in weights.staged(shared_device):
        _update(http, {"buffer": staged.buffer, "tensors": staged.tensors, "last": staged.last}, timeout)


def _by_broadcast(http: Connections, name: str, weights: WeightPayload, timeout: float) -> None:
    """Broadcast chunks in a process group whose rank 0 is the trainer; this also reaches other machines."""
    _broadcast(http, name, weights, timeout, "gloo", _workers(http, timeout)[0]["count"], CPU)


def _by_nccl(http: Connections, name: str, weights: WeightPayload, timeout: float) -> None:
    """Broadcast chunks from GPU to GPU."""
    device, workers = this_gpu(), _workers(http, timeout)
    for worker in workers:
        if worker["own"] in (None, gpu_of(device)):
            where = "is on a CPU" if worker["own"] is None else f"has the trainer's GPU {worker['own']}"
            raise ValueError(
                f"{http.url}: a worker {where}; actor_rollout_ref.rollout.weight_transfer=nccl needs "
                "a GPU for each. Set it to auto"
            )
    _broadcast(http, name, weights, timeout, "nccl", workers[0]["count"], device)


def _broadcast(
    http: Connections,
    name: str,
    weights: WeightPayload,
    timeout: float,
    backend: str,
    workers: int,
    device: torch.device,
) -> None:
    group = BroadcastGroup(http, workers, name, timeout, backend)
    group_info = {"address": group.address, "port": group.port, "ranks": group.ranks, "group": group.name,
             "backend": backend, "timeout": timeout}  # fmt: skip
    group.join("/init_weight_transfer_engine", {"init_info": group_info})
    for staged in weights.staged(lambda _: device):
        update = {"size": len(staged.content), "tensors": staged.tensors, "last": staged.last}
        group.send("/update_weights", {"update_info": update}, [staged.content])


def _by_location(http: Connections, name: str, weights: WeightPayload, timeout: float) -> None:
    (_by_tensor if is_local(http) else _by_broadcast)(http, name, weights, timeout)


def _update(http: Connections, update: dict[str, object], timeout: float) -> None:
    http.post("/update_weights", {"update_info": update}, timeout)


def _workers(http: Connections, timeout: float) -> list[dict[str, Any]]:
    """Return for each worker the ``gpus`` that it sees, its ``own`` GPU, and the ``count`` of all workers."""
    workers: list[dict[str, Any]] = http.post("/collective_rpc", {"method": "workers"}, timeout)["results"]
    return workers


TRANSFERS: Mapping[str, Transfer] = {
    "auto": _by_location,
    "disk": _by_disk,
    "tensor": _by_tensor,
    "distributed": _by_broadcast,
    "nccl": _by_nccl,
}
"""Transfer methods by their names in `actor_rollout_ref.rollout.weight_transfer`."""
