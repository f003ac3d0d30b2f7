"""The ways in which weights reach an SGLang server (`actor_rollout_ref.rollout.weight_transfer`).

Each names the new weights with its last request. Those that send several parts do so between ``/begin_weight_update``
and ``/end_weight_update``, as SGLang demands, and have the cache emptied with the last one only.
"""

from __future__ import annotations

import base64
import io
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from threading import Thread
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from torch.distributed.distributed_c10d import BroadcastOptions
from torch.multiprocessing.reductions import rebuild_storage_filename

from tether.rollout.servers import Connections, ServerGone, ServerRefuses, shared_file

Parts = Iterable[dict[str, Tensor]]
Way = Callable[[Connections, str, Parts, float], None]
Result = TypeVar("Result")


def _by_disk(http: Connections, name: str, parts: Parts, within: float) -> None:
    """All at once, in files that lie in memory: a folder of links to them is read like a checkpoint."""
    with ExitStack() as files, tempfile.TemporaryDirectory(prefix="tether-weights-") as folder:
        for number, part in enumerate(parts):
            Path(folder, f"{number:05}.safetensors").symlink_to(files.enter_context(shared_file(part)))
        asked = {"model_path": folder, "load_format": "safetensors", "weight_version": name, "flush_cache": True}
        http.post("/update_weights_from_disk", asked, within)


def _by_tensor(http: Connections, name: str, parts: Parts, within: float) -> None:
    """Part by part, as handles of shared memory, the same for every tensor-parallel rank."""
    ranks = _ranks(http, within)
    with _session(http, within):
        for part, last in _with_last(parts):
            copies = [(key, value.clone()) for key, value in part.items()]  # sharing moves what it shares
            payload = base64.b64encode(_pickled(copies)).decode()
            asked = {"serialized_named_tensors": [payload] * ranks, **_ending(name, last=last)}
            http.post("/update_weights_from_tensor", asked, within)


def _by_broadcast(http: Connections, name: str, parts: Parts, within: float) -> None:
    """Part by part, in broadcasts to a process group whose rank 0 is the trainer: to other machines, too."""
    ranks, here = 1 + _ranks(http, within), _address_towards(http)
    group_name = f"tether-{name}"  # not that of a run that was killed within an update, which the server still has
    store = TCPStore(here, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=within))
    joins = {"master_address": here, "master_port": store.port, "rank_offset": 1, "world_size": ranks,
             "group_name": group_name, "backend": "gloo"}  # fmt: skip

    def both(route: str, body: object, ours: Callable[[], Result]) -> Result:
        """The server's side and ours at once. Where it refuses, ours is left waiting: nobody will come."""
        meanwhile = _in_thread(ours)
        http.post(route, body, within)
        try:
            return meanwhile.result(within)
        except (RuntimeError, TimeoutError) as error:
            raise ServerGone(f"{http.url}{route}: {error}") from None

    group = both("/init_weights_update_group", joins, lambda: _join(store, here, ranks, group_name, within))
    with _session(http, within):
        for part, last in _with_last(parts):
            what = {
                "names": list(part),
                "dtypes": [str(value.dtype).removeprefix("torch.") for value in part.values()],
                "shapes": [list(value.shape) for value in part.values()],
                "group_name": group_name,
            }
            send = partial(_broadcast, group, list(part.values()))
            both("/update_weights_from_distributed", {**what, **_ending(name, last=last)}, send)
    http.post("/destroy_weights_update_group", {"group_name": group_name}, within)


def _in_thread(do: Callable[[], Result]) -> Future[Result]:
    """Run beside this thread; nobody has to wait for the end of it."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(do())
        except RuntimeError as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def _join(store: TCPStore, address: str, ranks: int, group_name: str, within: float) -> ProcessGroupGloo:
    """Be rank 0 of a group that torch knows by this name, without a world of which it would be a part."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=within)
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    as_torch_names = PrefixStore("cpu/", PrefixStore(f"{group_name}/", PrefixStore(group_name, store)))
    return ProcessGroupGloo(as_torch_names, 0, ranks, options)


def _broadcast(group: ProcessGroupGloo, tensors: list[Tensor]) -> None:
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    for work in [group.broadcast([value], options) for value in tensors]:  # type: ignore[attr-defined]
        work.wait()


def _ranks(http: Connections, within: float) -> int:
    """Tensor-parallel ranks of the server."""
    return int(http.get("/server_info", within).get("tp_size", 1))


def _address_towards(http: Connections) -> str:
    """This machine's, as the server's can reach it."""
    with socket.create_connection((http.host, http.port), timeout=10) as found:
        address: str = found.getsockname()[0]
        return address


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


def _with_last(parts: Parts) -> Iterator[tuple[dict[str, Tensor], bool]]:
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


WAYS: Mapping[str, Way] = {"disk": _by_disk, "tensor": _by_tensor, "distributed": _by_broadcast}
"""By the name in `actor_rollout_ref.rollout.weight_transfer`."""
