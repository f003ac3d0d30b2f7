"""Devices for which a run is planned: published ones in a table, custom numbers, or this machine as measured."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tether.runtime.cache import OTHER_CACHE, cache_dir
from tether.runtime.disk import writing
from tether.spelling import did_you_mean

GIB = 2**30


def gib(size: float) -> str:
    """Format bytes as GiB."""
    return f"{size / GIB:.1f} GiB" if size < 100 * GIB else f"{size / GIB:.0f} GiB"


@dataclass(frozen=True)
class Device:
    """The properties of a device that a plan needs."""

    name: str
    memory: float
    """Memory available to programs, in GiB."""
    teraflops: float
    """Rate of dense matrix products in the dtype of a run, in TFLOP/s."""
    bandwidth: float
    """Memory bandwidth, in GB/s."""
    link: float
    """Bandwidth to another device of the same machine in one direction, in GB/s."""
    network: float = 50.0
    """Bandwidth to a device of another machine, in GB/s."""
    watts: float = 0.0
    is_cpu: bool = False
    bfloat16: bool = True
    """Whether it supports bfloat16."""
    bus: float = 20.0
    """Bandwidth to and from host memory in one direction, in GB/s."""


DEVICES = {
    device.name: device
    for device in (
        # Dense bfloat16 rates, memory, NVLink (half of the two directions) or PCIe: vendors' data sheets. GeForce cards
        # from the 40 series on, and earlier ones without a bridge, have no peer-to-peer access, so data between them
        # goes through host memory: NCCL assumes 10 GB/s for a pair of RTX 4090 (the topology in the log of
        # https://github.com/NVIDIA/nccl-tests/issues/307). The bus rate is that of pinned copies: 20 of the 32 GB/s of
        # PCIe 4, 40 of the 64 of PCIe 5.
        Device("h100-80g", 79.1, 989, 3350, 450, 50, 700, bus=40),
        Device("h200-141g", 139.8, 989, 4800, 450, 50, 700, bus=40),
        Device("h800-80g", 79.1, 989, 3350, 200, 50, 700, bus=40),
        Device("h20-96g", 95.1, 148, 4000, 450, 50, 400, bus=40),
        Device("b200-192g", 178.0, 2250, 8000, 900, 50, 1000, bus=40),
        Device("a100-80g", 79.1, 312, 2039, 300, 25, 400),
        Device("a100-40g", 39.4, 312, 1555, 300, 25, 400),
        Device("a800-80g", 79.1, 312, 2039, 200, 25, 400),
        Device("l40s-48g", 44.4, 362, 864, 32, 12, 350),
        Device("a6000-48g", 47.4, 155, 768, 32, 12, 300),
        Device("a10-24g", 22.0, 125, 600, 32, 6, 150),
        Device("l4-24g", 22.0, 121, 300, 32, 6, 72),
        Device("rtx5090-32g", 31.3, 210, 1792, 16, 6, 575, bus=40),
        Device("rtx4090-24g", 23.6, 165, 1008, 10, 6, 450),
        Device("rtx3090-24g", 23.6, 71, 936, 10, 6, 350),
        Device("rtx4080-16g", 15.6, 97, 717, 10, 6, 320),
        Device("rtx3060-12g", 11.6, 25, 360, 8, 6, 170),
        Device("mi300x-192g", 190.5, 1307, 5300, 64, 50, 750, bus=40),
        Device("ascend910b-64g", 59.0, 376, 1600, 28, 25, 400),
        Device("generic-12g", 11.1, 50, 400, 8, 6, 200),
        Device("generic-24g", 22.1, 120, 900, 10, 6, 350),
        Device("generic-32g", 29.5, 150, 1000, 10, 6, 350),
        Device("generic-40g", 36.9, 312, 1555, 300, 25, 400),
        Device("generic-48g", 44.3, 200, 850, 32, 12, 350),
        Device("generic-80g", 73.8, 312, 2039, 300, 25, 400),
    )
}
OWN = ("memory", "teraflops", "bandwidth", "link", "network", "watts", "bus")
FORM = (
    "--device NAME[:COUNT], for example h100-80g:8, or your own numbers: memory=24,teraflops=120,bandwidth=900:2, and "
    "where they are known link= (GB/s between two devices), network= (between machines), bus= (to the host), watts="
)


@dataclass(frozen=True)
class Cluster:
    """The devices for which a run is planned."""

    device: Device
    per_node: int = 1
    nodes: int = 1

    @property
    def count(self) -> int:
        """Number of devices."""
        return self.per_node * self.nodes


def read_device(text: str) -> tuple[Device, int | None]:
    """Return the device of ``--device`` and the number of devices per machine, or None if that is not given.

    Raises:
        ValueError: the device is unknown, or a custom device lacks a number.
    """
    named, _, count = text.partition(":")
    if count and not re.fullmatch(r"[1-9]\d*", count):
        raise ValueError(f"--device {text}: {count!r} is no number of devices. Write {FORM}")
    number = int(count) if count else None
    if named == "this":
        return measured(), number
    if "=" in named:
        return _parse_device(named), number
    if named not in DEVICES:
        wanted = named.lower()
        raise ValueError(
            f"--device {text}: {named} is not known.{did_you_mean(wanted, DEVICES)} Take one of {', '.join(DEVICES)}, "
            "this (as `tether doctor` measured it), or your own numbers: memory=24,teraflops=120,bandwidth=900,link=10"
        )
    return DEVICES[named], number


def _parse_device(text: str) -> Device:
    numbers: dict[str, float] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        try:
            numbers[name] = float(value)
        except ValueError:
            numbers[name] = 0.0
        if name not in OWN or not 0 < numbers[name] < math.inf:
            raise ValueError(f"--device: {pair!r} is not {' or '.join(OWN)} with a number above 0. Write {FORM}")
    if missing := [name for name in OWN[:3] if name not in numbers]:
        raise ValueError(f"--device {text}: {missing[0]} is missing. Write {FORM}")
    base = Device("your device", 0.0, 1.0, 1.0, 16.0)
    return replace(base, **numbers)  # type: ignore[arg-type]  # floats alone


def measurement_file() -> Path:
    """Return the file in which `tether doctor` saves its measurements."""
    return cache_dir() / "machine.json"


def save_measurement(device: Device) -> None:
    """Save the measurements of this machine for later plans.

    Raises:
        ValueError: the cache cannot be written.
    """
    file = measurement_file()
    with writing(file, OTHER_CACHE):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(device), indent=1), encoding="utf-8")


def measured() -> Device:
    """Return this machine as `tether doctor` measured it.

    Raises:
        ValueError: it has not been measured.
    """
    file = measurement_file()
    try:
        return Device(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(
            "--device: this machine is not measured yet. Run `tether doctor` once, or name a device: "
            f"{', '.join(list(DEVICES)[:6])}, ..."
        ) from None
    except (OSError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: cannot be read ({error}). Run `tether doctor` again, which writes it") from None


def host_memory() -> float:
    """Return this machine's memory in GiB; infinite if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    except (ValueError, OSError, AttributeError):
        return float("inf")
