"""The transfers of weights to an SGLang server (`actor_rollout_ref.rollout.weight_transfer`).

Each sets the name of the new weights with its last request. Transfers of several chunks send them between
``/begin_weight_update`` and ``/end_weight_update``, as SGLang requires, and clear the cache with the last chunk only.
"""

from __future__ import annotations

import base64
import io
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_storage_filename

from tether.text.servers import (
    CPU,
    BroadcastGroup,
    Connections,
    ServerRefuses,
    WeightPayload,
    is_local,
    shared_file,
    this_gpu,
)

Transfer = Callable[[Connections, str, WeightPayload, float], None]


def _by_disk(http: Connections, name: str, weights: WeightPayload, timeout: float) -> None:
    """Send all weights together as files in memory; SGLang reads a folder of links to them like a checkpoint."""
    with ExitStack() as files, tempfile.TemporaryDirectory(prefix="tether-weights-") as folder:
        for index, chunk in enumerate(weights.chunks()):
            Path(folder, f"{index:05}.safetensors").symlink_to(files.enter_context(shared_file(chunk)))
        body = {"model_path": folder, "load_format": "safetensors", "weight_version": name, "flush_cache": True}
        http.post("/update_weights_from_disk", body, timeout)


def _by_tensor(http: Connections, name: str, weights: WeightPayload, timeout: float) -> None:
    """Send chunks as handles of shared memory, the same for all tensor-parallel ranks."""
    ranks = _ranks(http, timeout)
    with _session(http, timeout):
        for chunk, last in _with_last(weights.chunks()):
            copies = [(key, value.clone()) for key, value in chunk.items()]  # because sharing moves the storage
            payload = base64.b64encode(_pickled(copies)).decode()
            body = {"serialized_named_tensors": [payload] * ranks, **_ending(name, last=last)}
            http.post("/update_weights_from_tensor", body, timeout)


def _by_broadcast(http: Connections, name: str, weights: WeightPayload, timeout: float) -> None:
    """Broadcast chunks in a process group whose rank 0 is the trainer; also works across machines."""
    _broadcast(http, name, weights, timeout, "gloo", CPU)


def _by_nccl(http: Connections, name: str, weights: WeightPayload, timeout: float) -> None:
    """Broadcast from GPU to GPU; each rank requires a GPU of its own."""
    _broadcast(http, name, weights, timeout, "nccl", this_gpu())


def _broadcast(
    http: Connections, name: str, weights: WeightPayload, timeout: float, backend: str, device: torch.device
) -> None:
    group = BroadcastGroup(http, _ranks(http, timeout), name, timeout, backend)
    body = {"master_address": group.address, "master_port": group.port, "rank_offset": 1, "world_size": group.ranks,
             "group_name": group.name, "backend": backend}  # fmt: skip
    group.join("/init_weights_update_group", body)
    with _session(http, timeout):
        for chunk, last in _with_last(weights.chunks(device)):
            description = {
                "names": list(chunk),
                "dtypes": [str(value.dtype).removeprefix("torch.") for value in chunk.values()],
                "shapes": [list(value.shape) for value in chunk.values()],
                "group_name": group.name,
            }
            group.send(
                "/update_weights_from_distributed", {**description, **_ending(name, last=last)}, [*chunk.values()]
            )
    http.post("/destroy_weights_update_group", {"group_name": group.name}, timeout)


def _ranks(http: Connections, timeout: float) -> int:
    """Return the number of tensor-parallel ranks of the server."""
    return int(http.get("/server_info", timeout).get("tp_size", 1))


@contextmanager
def _session(http: Connections, timeout: float) -> Iterator[None]:
    """Open an update session, after closing one that an interrupted run left open."""
    with suppress(ServerRefuses):  # there is no open session
        http.post("/end_weight_update", timeout=timeout)
    http.post("/begin_weight_update", {"selector": "all"}, timeout)
    yield
    http.post("/end_weight_update", timeout=timeout)


def _ending(name: str, *, last: bool) -> dict[str, object]:
    return {"weight_version": name if last else None, "flush_cache": last}


def _with_last(chunks: Iterable[dict[str, Tensor]]) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Yield each chunk, and whether it is the last one."""
    before: dict[str, Tensor] | None = None
    for chunk in chunks:
        if before is not None:
            yield before, False
        before = chunk
    if before is not None:
        yield before, True


def _pickled(tensors: list[tuple[str, Tensor]]) -> bytes:
    """Pickle tensors by reference: a storage becomes the name of its shared memory, which any process of this user can
    open."""
    written = io.BytesIO()
    pickler = ForkingPickler(written)
    pickler.dispatch_table[torch.UntypedStorage] = _by_name
    pickler.dump(tensors)
    return written.getvalue()


def _by_name(storage: torch.UntypedStorage) -> tuple[Callable[..., object], tuple[object, ...]]:
    named = storage._share_filename_cpu_()
    storage._shared_incref()  # the reader decrements the count
    return rebuild_storage_filename, (type(storage), *named)


def _by_location(http: Connections, name: str, weights: WeightPayload, timeout: float) -> None:
    (_by_disk if is_local(http) else _by_broadcast)(http, name, weights, timeout)


TRANSFERS: Mapping[str, Transfer] = {
    "auto": _by_location,
    "disk": _by_disk,
    "tensor": _by_tensor,
    "distributed": _by_broadcast,
    "nccl": _by_nccl,
}
"""Name in `actor_rollout_ref.rollout.weight_transfer` -> transfer."""
