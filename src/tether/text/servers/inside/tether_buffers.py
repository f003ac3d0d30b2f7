"""The receiving side of `Staging`: bytes that a trainer sends to another process, in a shared buffer or by broadcast.

It also runs in vLLM's environment, so it may import only the standard library and torch.
"""

import base64
import mmap
import os
import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore
from torch.distributed.distributed_c10d import BroadcastOptions
from torch.multiprocessing.reductions import rebuild_cuda_tensor

BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"

Placements = list[tuple[str, str, list[int], int]]
"""Name, dtype, shape, and offset in the buffer."""


class Buffer:
    """The bytes that the trainer sent. The last buffer stays open: reopening it would cost one page fault per page."""

    def __init__(self) -> None:
        self.bytes: torch.Tensor | None = None
        self._name = ""
        self._group: Backend | None = None
        self._device = torch.device("cpu")

    def open(self, handle: dict[str, Any]) -> None:
        """Open a buffer of the trainer, unless it is already open.

        Raises:
            ValueError: it does not exist on this machine: the trainer is on another machine, or in another container.
        """
        if handle["name"] != self._name:
            self.bytes, self._name = None, ""
            self.bytes = _of_gpu(handle) if "gpu" in handle else _of_host(handle)
            self._name = handle["name"]

    def join(self, address: str, port: int, rank: int, ranks: int, group: str, backend: str, timeout: float) -> None:
        """Join a process group whose rank 0 is the trainer, as `joined` does.

        Raises:
            ValueError: the trainer cannot be reached.
        """
        self._group, limit = None, timedelta(seconds=timeout)
        own_address = _own_address(address, port)
        store = TCPStore(address, port, is_master=False, timeout=limit)
        self._group = joined(store, rank, ranks, group, backend, own_address, limit)
        self._device = torch.device(_BACKENDS[backend][0])

    def receive(self, size: int) -> None:
        """Receive `size` broadcast bytes into the buffer."""
        if self._group is None:
            raise RuntimeError("no process group has been joined")
        buffer = self.bytes
        if self._name or buffer is None or len(buffer) < size or buffer.device.type != self._device.type:
            self.bytes, self._name = torch.empty(size, dtype=torch.uint8, device=self._device), ""
        assert self.bytes is not None
        broadcast(self._group, [self.bytes[:size]])

    def leave(self) -> None:
        """Leave the process group, if any."""
        self._group = None

    def tensors(self, placements: Placements) -> dict[str, torch.Tensor]:
        """Return views of the tensors in the buffer; the next bytes overwrite them."""
        assert self.bytes is not None
        tensors = {}
        for name, kind, shape, begin in placements:
            dtype = getattr(torch, kind)
            end = begin + dtype.itemsize * torch.Size(shape).numel()
            tensors[name] = self.bytes[begin:end].view(dtype).view(shape)
        return tensors

    def holds(self, value: object) -> bool:
        """Return whether a value is a tensor in the buffer."""
        return (
            isinstance(value, torch.Tensor)
            and self.bytes is not None
            and (value.untyped_storage().data_ptr() == self.bytes.untyped_storage().data_ptr())
        )


def _of_host(handle: dict[str, Any]) -> torch.Tensor:
    try:
        with open(handle["path"], "r+b") as file:
            error_detail = os.readlink(f"/proc/self/fd/{file.fileno()}")
            if handle["name"] in error_detail:
                return torch.frombuffer(mmap.mmap(file.fileno(), handle["size"]), dtype=torch.uint8)
    except OSError as error:
        error_detail = str(error)
    raise ValueError(f"the trainer's memory cannot be opened from here ({error_detail})")


def _of_gpu(handle: dict[str, Any]) -> torch.Tensor:
    """Open a buffer on a GPU by CUDA's IPC; the index of a GPU may differ between processes."""
    indices = {name: index for index, name in enumerate(gpus())}
    if handle["gpu"] not in indices:
        raise ValueError(f"the trainer's GPU {handle['gpu']} cannot be opened from here, where there are {[*indices]}")
    ipc_handle, size, begins, counter, counter_offset, event, waits = handle["memory"]
    ipc_handle, counter, event = (base64.b64decode(field) for field in (ipc_handle, counter, event))
    buffer: torch.Tensor = rebuild_cuda_tensor(
        torch.Tensor, (handle["size"],), (1,), 0, torch.storage.TypedStorage, torch.uint8, indices[handle["gpu"]],
        ipc_handle, size, begins, False, counter, counter_offset, event, waits,
    )  # fmt: skip
    return buffer


def gpus() -> list[str]:
    """Return the names of the GPUs that this process sees, in the order of their indices."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def _own_address(address: str, port: int) -> str:
    """Return the address of this machine at which the trainer can reach it."""
    try:
        with socket.create_connection((address, port), timeout=10) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        what = f"the trainer cannot be reached from here at {address}, port {port} ({error})"
        raise ValueError(f"{what}; all of its ports must be open to this machine") from None


def joined(store: Store, rank: int, ranks: int, group: str, backend: str, address: str, timeout: timedelta) -> Backend:
    """Return a process group with the name that torch expects, without a default group.

    Args:
        store: store shared by all ranks.
        rank: rank of this process; 0 broadcasts.
        ranks: number of ranks.
        group: name of the group.
        backend: ``gloo``, for tensors on the host, or ``nccl``, for tensors on GPUs, where each rank needs its own GPU.
        address: address of this machine at which the other ranks can reach it.
        timeout: limit for joining, and for each broadcast.
    """
    device, join = _BACKENDS[backend]
    as_torch_names = PrefixStore(f"{device}/", PrefixStore(f"{group}/", PrefixStore(group, store)))
    return join(as_torch_names, rank, ranks, address, timeout)


def broadcast(group: Backend, tensors: Iterable[torch.Tensor]) -> None:
    """Broadcast tensors from rank 0 to the other ranks and wait for completion.

    Raises:
        RuntimeError: a rank is gone, or the timeout expired.
    """
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    for work in [group.broadcast([value], options) for value in tensors]:  # type: ignore[attr-defined]
        work.wait()


def _gloo(store: Store, rank: int, ranks: int, address: str, timeout: timedelta) -> Backend:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(store, rank, ranks, options)


def _nccl(store: Store, rank: int, ranks: int, address: str, timeout: timedelta) -> Backend:
    """Join an NCCL group whose `wait` raises when a rank is gone; by default torch would end the process."""
    from torch.distributed import ProcessGroupNCCL  # only builds of torch with CUDA have it

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    before = os.environ.get(BLOCKING)
    os.environ[BLOCKING] = "1"  # read only by the next line
    try:
        return ProcessGroupNCCL(store, rank, ranks, options)
    finally:
        if before is None:
            del os.environ[BLOCKING]
        else:
            os.environ[BLOCKING] = before


_Join = Callable[[Store, int, int, str, timedelta], Backend]
_BACKENDS: dict[str, tuple[str, _Join]] = {"gloo": ("cpu", _gloo), "nccl": ("cuda", _nccl)}
"""Backend -> its device, which is part of the keys in the store, and the function that joins a group."""
