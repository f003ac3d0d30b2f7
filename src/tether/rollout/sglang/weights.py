"""The ways in which weights reach an SGLang server (`actor_rollout_ref.rollout.weight_transfer`).

Each names the new weights with its last request. Those that send several parts do so between ``/begin_weight_update``
and ``/end_weight_update``, as SGLang demands, and have the cache emptied with the last one only.
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

from tether.rollout.servers import (
    CPU,
    BroadcastGroup,
    Connections,
    Outgoing,
    ServerRefuses,
    is_here,
    shared_file,
    this_gpu,
)

Way = Callable[[Connections, str, Outgoing, float], None]


def _by_disk(http: Connections, name: str, weights: Outgoing, within: float) -> None:
    """All at once, in files that lie in memory: a folder of links to them is read like a checkpoint."""
    with ExitStack() as files, tempfile.TemporaryDirectory(prefix="tether-weights-") as folder:
        for number, part in enumerate(weights.parts()):
            Path(folder, f"{number:05}.safetensors").symlink_to(files.enter_context(shared_file(part)))
        asked = {"model_path": folder, "load_format": "safetensors", "weight_version": name, "flush_cache": True}
        http.post("/update_weights_from_disk", asked, within)


def _by_tensor(http: Connections, name: str, weights: Outgoing, within: float) -> None:
    """Part by part, as handles of shared memory, the same for every tensor-parallel rank."""
    ranks = _ranks(http, within)
    with _session(http, within):
        for part, last in _with_last(weights.parts()):
            copies = [(key, value.clone()) for key, value in part.items()]  # sharing moves what it shares
            payload = base64.b64encode(_pickled(copies)).decode()
            asked = {"serialized_named_tensors": [payload] * ranks, **_ending(name, last=last)}
            http.post("/update_weights_from_tensor", asked, within)


def _by_broadcast(http: Connections, name: str, weights: Outgoing, within: float) -> None:
    """Part by part, in broadcasts to a process group whose rank 0 is the trainer: to other machines, too."""
    _broadcast(http, name, weights, within, "gloo", CPU)


def _by_nccl(http: Connections, name: str, weights: Outgoing, within: float) -> None:
    """The same from GPU to GPU, of which each rank needs its own."""
    _broadcast(http, name, weights, within, "nccl", this_gpu())


def _broadcast(
    http: Connections, name: str, weights: Outgoing, within: float, backend: str, device: torch.device
) -> None:
    group = BroadcastGroup(http, _ranks(http, within), name, within, backend)
    joins = {"master_address": group.address, "master_port": group.port, "rank_offset": 1, "world_size": group.ranks,
             "group_name": group.name, "backend": backend}  # fmt: skip
    group.join("/init_weights_update_group", joins)
    with _session(http, within):
        for part, last in _with_last(weights.parts(device)):
            what = {
                "names": list(part),
                "dtypes": [str(value.dtype).removeprefix("torch.") for value in part.values()],
                "shapes": [list(value.shape) for value in part.values()],
                "group_name": group.name,
            }
            group.send("/update_weights_from_distributed", {**what, **_ending(name, last=last)}, [*part.values()])
    http.post("/destroy_weights_update_group", {"group_name": group.name}, within)


def _ranks(http: Connections, within: float) -> int:
    """Tensor-parallel ranks of the server."""
    return int(http.get("/server_info", within).get("tp_size", 1))


@contextmanager
def _session(http: Connections, within: float) -> Iterator[None]:
    """One that an interrupted run left open is closed first."""
    with suppress(ServerRefuses):  # there is none
        http.post("/end_weight_update", within=within)
    http.post("/begin_weight_update", {"selector": "all"}, within)
    yield
    http.post("/end_weight_update", within=within)


def _ending(name: str, *, last: bool) -> dict[str, object]:
    return {"weight_version": name if last else None, "flush_cache": last}


def _with_last(parts: Iterable[dict[str, Tensor]]) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Each part, and whether it is the last one."""
    before: dict[str, Tensor] | None = None
    for part in parts:
        if before is not None:
            yield before, False
        before = part
    if before is not None:
        yield before, True


def _pickled(tensors: list[tuple[str, Tensor]]) -> bytes:
    """By reference: a storage is the name of its shared memory, which any process of this user can open."""
    written = io.BytesIO()
    pickler = ForkingPickler(written)
    pickler.dispatch_table[torch.UntypedStorage] = _by_name
    pickler.dump(tensors)
    return written.getvalue()


def _by_name(storage: torch.UntypedStorage) -> tuple[Callable[..., object], tuple[object, ...]]:
    named = storage._share_filename_cpu_()
    storage._shared_incref()  # which the reader gives back
    return rebuild_storage_filename, (type(storage), *named)


def _by_place(http: Connections, name: str, weights: Outgoing, within: float) -> None:
    (_by_disk if is_here(http) else _by_broadcast)(http, name, weights, within)


WAYS: Mapping[str, Way] = {
    "auto": _by_place,
    "disk": _by_disk,
    "tensor": _by_tensor,
    "distributed": _by_broadcast,
    "nccl": _by_nccl,
}
"""By the name in `actor_rollout_ref.rollout.weight_transfer`."""
