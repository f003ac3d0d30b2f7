"""`tether doctor`: installed packages, the device of a run, and what each extra adds."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.table import Table

from tether.kernels import backend
from tether.plan.devices import GIB, Device, save_measurement
from tether.runtime.cache import cache_dir
from tether.runtime.core_clock import BUSY, CoreClock
from tether.runtime.install import pip_install
from tether.runtime.machine import available_memory, computes_in_bfloat16, resolve_device
from tether.runtime.ranks import RankFailed
from tether.runtime.terminal import Screen
from tether.runtime.threads import num_threads, usable_cores

CORE = (
    "torch",
    "transformers",
    "tokenizers",
    "tensordict",
    "numba",
    "pydantic",
    "hydra-core",
    "datasets",
    "math-verify",
)
EXTRAS = {
    "gymnasium": ("gymnasium", "environments: tether train env.train.id=CartPole-v1"),
    "mujoco": ("mujoco", "MuJoCo environments such as HalfCheetah-v5"),
    "envpool": ("envpool", "environments in C++ (env.train.env_type=envpool)"),
    "metaworld": ("metaworld", "MetaWorld v3 (env.train.env_type=metaworld)"),
    "mani-skill": ("maniskill", "ManiSkill3 (env.train.env_type=maniskill)"),
    "hf-libero": ("libero", "LIBERO (env.train.env_type=libero)"),
    "reasoning-gym": ("quickstart", "procedural tasks with verifiers: data.train_files=reasoning_gym:TASK"),
    "gguf": ("quickstart", "models from GGUF files, among them those of tether model pull"),
    "matplotlib": ("quickstart", "tether plot"),
    "uvicorn": ("view", "tether view in a browser"),
    "liger-kernel": ("cuda-kernels", "fused norms and gated MLPs on CUDA"),
    "flash-attn": ("cuda-kernels", "attention over packed sequences on CUDA"),
    "ray": ("ray", "several devices: trainer.n_gpus_per_node, trainer.nnodes"),
    "peft": ("lora", "LoRA: actor_rollout_ref.model.lora_rank"),
    "mcp": ("mcp", "tools of MCP servers"),
    "verifiers": ("verifiers", "environments of verifiers: data.train_files=verifiers:NAME"),
    "modelscope": ("modelscope", "models of ModelScope: actor_rollout_ref.model.path=modelscope:OWNER/NAME"),
    "tensorboard": ("tensorboard", "trainer.logger=tensorboard"),
    "wandb": ("wandb", "trainer.logger=wandb"),
    "mlflow-skinny": ("mlflow", "trainer.logger=mlflow"),
    "trackio": ("trackio", "trainer.logger=trackio"),
    "swanlab": ("swanlab", "trainer.logger=swanlab"),
}

MEASURED_SECONDS, MIN_CALLS = 0.5, 5
"""Minimum seconds and minimum number of calls of a measurement."""

NEEDS_COMPILER = (
    "one of its requirements, pycosat, comes as C source, and there is no C compiler (cc) here: install one first "
    "(apt-get install gcc python3-dev, or conda install gcc), or pip fails"
)


def show_doctor() -> None:
    """Print the report of installed packages, device and extras."""
    console = Screen()
    device = resolve_device("auto")
    console.print(f"python {platform.python_version()} on {platform.platform()} ({sys.executable})", soft_wrap=True)
    console.print(f"device: {_describe(device)}; {usable_cores()} CPU cores for this process, {num_threads()} threads")
    cores, machine = CoreClock(), measure(device)
    waited = cores.wait_fraction() or 0.0
    console.print(f"dtype: {_dtype_advice(device, machine)}")
    try:
        save_measurement(machine)
        kept = "kept for `tether plan`"
    except ValueError as error:  # a read-only home directory
        kept = f"not kept for `tether plan`: {error}"
    console.print(f"memory: {machine.memory:.1f} GiB, read at {machine.bandwidth:.0f} GB/s ({kept})", soft_wrap=True)
    if waited > BUSY:
        note = f"other programs had the cores for {waited:.0%} of the measurement, so its rates are by processor time"
        console.print(f"{note}, and runs are slower than `tether plan` says", soft_wrap=True)
    console.print(f"kernels in bfloat16: {backend(device.type, torch.bfloat16).describe()}")
    free = shutil.disk_usage(".").free / 2**30
    console.print(f"disk: {free:.0f} GiB free in this folder; models are cached in {cache_dir()}")
    if address := os.environ.get("RAY_ADDRESS"):
        for line in _cluster(address):
            console.print(line, soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("package", "version", "what it adds"):
        table.add_column(column, overflow="fold")
    commands: dict[str, list[str]] = {}  # printed below the table, which would wrap them
    for name, (extra, adds) in (dict.fromkeys(CORE, ("", "core")) | EXTRAS).items():
        version, supported = _version(name), supported_versions(name, extra)
        table.add_row(name, version or ("-" if extra else "MISSING"), adds)
        if version is None and extra:
            commands.setdefault(pip_install(extra), []).append(name)
        elif version is None or not supported.contains(version, prereleases=True):
            commands.setdefault(f"pip install '{name}{supported}'", []).append(name)
    console.print(table)
    for command, names in commands.items():
        console.print(f"{command}  # {', '.join(names)}", soft_wrap=True)
    if any("reasoning-gym" in names for names in commands.values()) and not has_compiler():
        console.print(f"reasoning-gym: {NEEDS_COMPILER}", soft_wrap=True)


def has_compiler() -> bool:
    """Whether packages with C sources can be installed; setuptools compiles them with $CC or cc."""
    return shutil.which(os.environ.get("CC") or "cc") is not None


def supported_versions(package: str, extra: str = "") -> SpecifierSet:
    """Return the versions of a package that tether, or one of its extras, supports."""
    requirements = [Requirement(text) for text in importlib.metadata.requires("tether") or []]
    matching = [r for r in requirements if r.name == package and (not r.marker or r.marker.evaluate({"extra": extra}))]
    return SpecifierSet(",".join(str(requirement.specifier) for requirement in matching))


def _cluster(address: str) -> list[str]:
    """Return lines that describe the nodes of a Ray cluster."""
    try:
        nodes = importlib.import_module("tether.distributed.cluster").nodes_of(address)
    except (ModuleNotFoundError, RankFailed) as error:
        return [f"RAY_ADDRESS={address}: {error}"]
    return [f"cluster at {address}: {len(nodes)} nodes", *(f"  {node}" for node in nodes)]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"cuda ({properties.name}, {properties.total_memory / 2**30:.0f} GiB)"
    return device.type


def measure(device: torch.device) -> Device:
    """Measure the properties of this machine that a plan needs: memory, its bandwidth, the rate of matrix products."""
    narrow = computes_in_bfloat16(device)
    memory = available_memory(device) or 0
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    rate = _matmul_gflops(device, torch.bfloat16 if narrow else torch.float32)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine"
    bandwidth = _bandwidth(device)
    link = 16.0 if device.type == "cuda" else bandwidth / 4
    return Device(name, memory / GIB, rate / 1e3, bandwidth, link, 10.0, is_cpu=device.type != "cuda", bfloat16=narrow)


def _dtype_advice(device: torch.device, machine: Device) -> str:
    """Return the dtype that auto selects on this device, and the speed of a matrix product in both dtypes."""
    other = _matmul_gflops(device, torch.float32 if machine.bfloat16 else torch.bfloat16)
    half, single = (machine.teraflops * 1e3, other) if machine.bfloat16 else (other, machine.teraflops * 1e3)
    chosen = "bfloat16 over float32 master weights" if machine.bfloat16 else "float32"
    return f"{chosen} (matrix product {half:.0f} GFLOP/s in bfloat16, {single:.0f} in float32)"


def _bandwidth(device: torch.device, megabytes: int = 256) -> float:
    """Return the rate in GB/s at which memory is read, measured by summing a tensor larger than the caches."""
    values = torch.ones(megabytes * 2**18, device=device)
    return values.nbytes / _fastest(lambda: float(values.sum()), device) / 1e9


def _matmul_gflops(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    """Return the rate of matrix products in GFLOP/s."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _fastest(lambda: float((a @ b)[0, 0]), device) / 1e9


def _fastest(call: Callable[[], float], device: torch.device) -> float:
    """Return the seconds of the fastest of many short calls.

    If other programs used the CPU's cores meanwhile, return processor time divided by threads instead, which excludes
    their time.
    """
    call()  # warm up, and wait for the device
    cores, end = CoreClock(), time.perf_counter() + MEASURED_SECONDS
    seconds, processor = list[float](), list[float]()
    while len(seconds) < MIN_CALLS or time.perf_counter() < end:
        start, ran = time.perf_counter(), time.process_time()
        call()
        seconds.append(time.perf_counter() - start)
        processor.append((time.process_time() - ran) / torch.get_num_threads())
    is_busy = device.type == "cpu" and (cores.wait_fraction() or 0.0) > BUSY
    return min(processor if is_busy else seconds)
