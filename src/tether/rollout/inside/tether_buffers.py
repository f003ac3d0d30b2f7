"""Bytes that a trainer hands to another process: in a buffer that both have open, or by broadcast. See `Staging`.

It runs in vLLM's environment, too, and may import the standard library and torch.
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

Placed = list[tuple[str, str, list[int], int]]
"""Name, number format, shape, and first byte in the buffer."""


class Buffer:
    """The bytes that the trainer sent. The last buffer stays open: opening it again costs one page fault per page."""

    def __init__(self) -> None:
        self.bytes: torch.Tensor | None = None
        self._name = ""
        self._group: Backend | None = None
        self._device = torch.device("cpu")

    def open(self, told: dict[str, Any]) -> None:
        """Open a buffer of the trainer, unless it is open.

        Raises:
            ValueError: it is not there: the trainer is on another machine, or in another container.
        """
        if told["name"] != self._name:
            self.bytes, self._name = None, ""
            self.bytes = _of_gpu(told) if "gpu" in told else _of_host(told)
            self._name = told["name"]

    def join(self, address: str, port: int, rank: int, ranks: int, group: str, backend: str, within: float) -> None:
        """Join a process group whose rank 0 is the trainer; see `joined`.

        Raises:
            ValueError: the trainer cannot be reached.
        """
        self._group, timeout = None, timedelta(seconds=within)
        own = _own_address(address, port)
        store = TCPStore(address, port, is_master=False, timeout=timeout)
        self._group = joined(store, rank, ranks, group, backend, own, timeout)
        self._device = torch.device(_BACKENDS[backend][0])

    def receive(self, size: int) -> None:
        """Have as many bytes broadcast into it."""
        if self._group is None:
            raise RuntimeError("no process group has been joined")
        known = self.bytes
        if self._name or known is None or len(known) < size or known.device.type != self._device.type:
            self.bytes, self._name = torch.empty(size, dtype=torch.uint8, device=self._device), ""
        assert self.bytes is not None
        broadcast(self._group, [self.bytes[:size]])

    def leave(self) -> None:
        """Leave the process group, if any."""
        self._group = None

    def tensors(self, placed: Placed) -> dict[str, torch.Tensor]:
        """Views of the tensors that lie in it: the next bytes change them."""
        assert self.bytes is not None
        found = {}
        for name, kind, shape, begin in placed:
            dtype = getattr(torch, kind)
            end = begin + dtype.itemsize * torch.Size(shape).numel()
            found[name] = self.bytes[begin:end].view(dtype).view(shape)
        return found

    def holds(self, value: object) -> bool:
        """Whether it is a tensor that lies in it."""
        return (
            isinstance(value, torch.Tensor)
            and self.bytes is not None
            and (value.untyped_storage().data_ptr() == self.bytes.untyped_storage().data_ptr())
        )


def _of_host(told: dict[str, Any]) -> torch.Tensor:
    try:
        with open(told["path"], "r+b") as file:
            found = os.readlink(f"/proc/self/fd/{file.fileno()}")
            if told["name"] in found:
                return torch.frombuffer(mmap.mmap(file.fileno(), told["size"]), dtype=torch.uint8)
    except OSError as error:
        found = str(error)
    raise ValueError(f"the trainer's memory cannot be opened from here ({found})")


def _of_gpu(told: dict[str, Any]) -> torch.Tensor:
    """By CUDA's IPC; the GPU has another number in each process that sees others."""
    numbers = {name: number for number, name in enumerate(gpus())}
    if told["gpu"] not in numbers:
        raise ValueError(f"the trainer's GPU {told['gpu']} cannot be opened from here, where there are {[*numbers]}")
    handle, size, begins, counter, counter_offset, event, waits = told["memory"]
    handle, counter, event = (base64.b64decode(part) for part in (handle, counter, event))
    found: torch.Tensor = rebuild_cuda_tensor(
        torch.Tensor, (told["size"],), (1,), 0, torch.storage.TypedStorage, torch.uint8, numbers[told["gpu"]],
        handle, size, begins, False, counter, counter_offset, event, waits,
    )  # fmt: skip
    return found


def gpus() -> list[str]:
    """Names of the GPUs that this process sees, by their number in it."""
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]


def _own_address(address: str, port: int) -> str:
    """This machine's, as that one can reach it."""
    try:
        with socket.create_connection((address, port), timeout=10) as found:
            return str(found.getsockname()[0])
    except OSError as error:
        what = f"the trainer cannot be reached from here at {address}, port {port} ({error})"
        raise ValueError(f"{what}; all of its ports must be open to this machine") from None


def joined(store: Store, rank: int, ranks: int, group: str, backend: str, address: str, timeout: timedelta) -> Backend:
    """A process group that torch knows by this name, without a world of which it would be a part.

    Args:
        store: of all ranks.
        rank: of this process; 0 broadcasts.
        ranks: how many there are.
        group: its name.
        backend: ``gloo``, for tensors on the host, or ``nccl``, for those on GPUs, of which each rank needs its own.
        address: of this machine, as the others can reach it.
        timeout: for joining, and for each broadcast.
    """
    device, join = _BACKENDS[backend]
    as_torch_names = PrefixStore(f"{device}/", PrefixStore(f"{group}/", PrefixStore(group, store)))
    return join(as_torch_names, rank, ranks, address, timeout)


def broadcast(group: Backend, tensors: Iterable[torch.Tensor]) -> None:
    """Send tensors from rank 0 to the others, and wait until they are there.

    Raises:
        RuntimeError: a rank is gone, or the timeout is over.
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
    """One whose `wait` raises where a rank is gone; by default torch would end the process."""
    from torch.distributed import ProcessGroupNCCL  # which only a torch for CUDA has

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    before = os.environ.get(BLOCKING)
    os.environ[BLOCKING] = "1"  # read by the next line alone
    try:
        return ProcessGroupNCCL(store, rank, ranks, options)
    finally:
        if before is None:
            del os.environ[BLOCKING]
        else:
            os.environ[BLOCKING] = before


_Join = Callable[[Store, int, int, str, timedelta], Backend]
_BACKENDS: dict[str, tuple[str, _Join]] = {"gloo": ("cpu", _gloo), "nccl": ("cuda", _nccl)}
"""Their device, which stands in the names of keys in the store, and how to join."""
