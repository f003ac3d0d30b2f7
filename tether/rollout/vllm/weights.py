"""The ways in which weights reach a vLLM server (`actor_rollout_ref.rollout.weight_transfer`), within an open update.

``inside/`` has the other side: it is given where some tensors lie, and keeps its share of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tether.rollout.servers import BroadcastGroup, Connections, Outgoing, is_here, shared_file

Way = Callable[[Connections, str, Outgoing, float], None]


def _by_disk(http: Connections, name: str, weights: Outgoing, within: float) -> None:
    """Part by part, in files that lie in memory."""
    for part in weights.parts():
        with shared_file(part) as path:
            _update(http, {"path": path}, within)


def _by_tensor(http: Connections, name: str, weights: Outgoing, within: float) -> None:
    """Part by part, in a buffer that the workers have open: of this machine's memory, or of a GPU's."""
    for staged in weights.staged(gpus=lambda: _workers(http, within)["gpus"]):
        _update(http, {"buffer": staged.buffer, "tensors": staged.tensors, "last": staged.last}, within)


def _by_broadcast(http: Connections, name: str, weights: Outgoing, within: float) -> None:
    """Part by part, in broadcasts to a process group whose rank 0 is the trainer: to other machines, too."""
    group = BroadcastGroup(http, _workers(http, within)["count"], f"tether-{name}", within)
    joins = {"address": group.address, "port": group.port, "ranks": group.ranks, "group": group.name, "within": within}
    group.join("/init_weight_transfer_engine", {"init_info": joins})
    for staged in weights.staged():
        told = {"size": len(staged.content), "tensors": staged.tensors, "last": staged.last}
        group.send("/update_weights", {"update_info": told}, [staged.content])


def _by_place(http: Connections, name: str, weights: Outgoing, within: float) -> None:
    (_by_tensor if is_here(http) else _by_broadcast)(http, name, weights, within)


def _update(http: Connections, told: dict[str, object], within: float) -> None:
    http.post("/update_weights", {"update_info": told}, within)


def _workers(http: Connections, within: float) -> dict[str, Any]:
    """The number of workers, and the GPUs that all of them can open."""
    found: list[dict[str, Any]] = http.post("/collective_rpc", {"method": "workers"}, within)["results"]
    return {"count": found[0]["count"], "gpus": set.intersection(*(set(one["gpus"]) for one in found))}


WAYS: Mapping[str, Way] = {
    "auto": _by_place,
    "disk": _by_disk,
    "tensor": _by_tensor,
    "distributed": _by_broadcast,
}
"""By the name in `actor_rollout_ref.rollout.weight_transfer`."""
