"""The ways in which weights reach a vLLM server (`actor_rollout_ref.rollout.weight_transfer`), within an open update.

`tether.rollout.inside` has the other side: it is given where some tensors lie, and keeps its share of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tether.rollout.servers import CPU, BroadcastGroup, Connections, Outgoing, gpu_of, is_here, shared_file, this_gpu

Way = Callable[[Connections, str, Outgoing, float], None]


def _by_disk(http: Connections, name: str, weights: Outgoing, within: float) -> None:
    """Part by part, in files that lie in memory."""
    for part in weights.parts():
        with shared_file(part) as path:
            _update(http, {"path": path}, within)


def _by_tensor(http: Connections, name: str, weights: Outgoing, within: float) -> None:
    """Part by part, in a buffer that the workers have open: of this machine's memory, or of a GPU's."""

    def open_to_all(device: torch.device) -> torch.device:
        seen = device.type == "cuda" and all(gpu_of(device) in one["gpus"] for one in _workers(http, within))
        return device if seen else CPU

    for staged in weights.staged(open_to_all):
        _update(http, {"buffer": staged.buffer, "tensors": staged.tensors, "last": staged.last}, within)


def _by_broadcast(http: Connections, name: str, weights: Outgoing, within: float) -> None:
    """Part by part, in broadcasts to a process group whose rank 0 is the trainer: to other machines, too."""
    _broadcast(http, name, weights, within, "gloo", _workers(http, within)[0]["count"], CPU)


def _by_nccl(http: Connections, name: str, weights: Outgoing, within: float) -> None:
    """The same from GPU to GPU.

    Raises:
        ValueError: a worker has no GPU, or has that of the trainer.
    """
    device, workers = this_gpu(), _workers(http, within)
    for worker in workers:
        if worker["own"] in (None, gpu_of(device)):
            where = "is on a CPU" if worker["own"] is None else f"has the trainer's GPU {worker['own']}"
            raise ValueError(
                f"{http.url}: a worker {where}; actor_rollout_ref.rollout.weight_transfer=nccl needs "
                "a GPU for each. Set it to auto"
            )
    _broadcast(http, name, weights, within, "nccl", workers[0]["count"], device)


def _broadcast(
    http: Connections, name: str, weights: Outgoing, within: float, backend: str, workers: int, device: torch.device
) -> None:
    group = BroadcastGroup(http, workers, name, within, backend)
    joins = {"address": group.address, "port": group.port, "ranks": group.ranks, "group": group.name,
             "backend": backend, "within": within}  # fmt: skip
    group.join("/init_weight_transfer_engine", {"init_info": joins})
    for staged in weights.staged(lambda _: device):
        told = {"size": len(staged.content), "tensors": staged.tensors, "last": staged.last}
        group.send("/update_weights", {"update_info": told}, [staged.content])


def _by_place(http: Connections, name: str, weights: Outgoing, within: float) -> None:
    (_by_tensor if is_here(http) else _by_broadcast)(http, name, weights, within)


def _update(http: Connections, told: dict[str, object], within: float) -> None:
    http.post("/update_weights", {"update_info": told}, within)


def _workers(http: Connections, within: float) -> list[dict[str, Any]]:
    """Each worker's ``gpus`` that it sees, its ``own`` one, and the ``count`` of all."""
    found: list[dict[str, Any]] = http.post("/collective_rpc", {"method": "workers"}, within)["results"]
    return found


WAYS: Mapping[str, Way] = {
    "auto": _by_place,
    "disk": _by_disk,
    "tensor": _by_tensor,
    "distributed": _by_broadcast,
    "nccl": _by_nccl,
}
"""By the name in `actor_rollout_ref.rollout.weight_transfer`."""
