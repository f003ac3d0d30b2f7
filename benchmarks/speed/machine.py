"""The machine of the measurements, and its limits."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.speed.timing import seconds

SIZE = 2048  # of the square product that stands for the best the machine can do
LARGE = 1 << 27  # float32 numbers: 512 MiB


def machine_line() -> str:
    """Processor, cores and versions."""
    packages = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers", "tether"))
    threads = torch.get_num_threads()
    return f"{_processor()}, {os.cpu_count()} cores, {threads} threads, Python {platform.python_version()}, {packages}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.machine()
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    units = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()]
    return f"{fields.get('model name', platform.machine())} ({', '.join(units)})"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "from this folder"


@dataclass(frozen=True)
class Roofline:
    """The most that matrix products and memory allow."""

    rate: float
    """bf16 FLOP a second of a large square product."""
    bandwidth: float
    """Bytes a second that a sum over a tensor larger than any cache reads."""
    weights: int
    """Entries of the matrices that every token passes."""
    head: int
    """Entries of the output head."""

    def training(self, model_tokens: int, head_tokens: int, passes: int = 3) -> float:
        """Seconds of these products alone: forward and backward are three passes, a forward is one."""
        return 2 * passes * (self.weights * model_tokens + self.head * head_tokens) / self.rate

    def decoding(self, rows: int, steps: int) -> float:
        """Seconds of `steps` decoding steps: their products, or reading the bfloat16 weights if that takes longer."""
        entries = self.weights + self.head
        return steps * max(2 * entries * rows / self.rate, 2 * entries / self.bandwidth)

    def generating(self, prompts: int, prompt_tokens: int, rows: int, new_tokens: int) -> float:
        """Seconds of the prompts' products, which give the first token of each row, and of the steps for the others."""
        return self.training(prompt_tokens, prompts, passes=1) + self.decoding(rows, new_tokens - 1)

    def measured_again(self) -> Roofline:
        """The same with what the machine does now, where that is more."""
        left, right = torch.randn(2, SIZE, SIZE).to(torch.bfloat16)
        out = torch.empty_like(left)
        rate = 2 * SIZE**3 / min(seconds(lambda: torch.mm(left, right, out=out)) for _ in range(10))
        large = torch.ones(LARGE)
        bandwidth = large.nbytes / min(seconds(large.sum) for _ in range(5))
        return replace(self, rate=max(self.rate, rate), bandwidth=max(self.bandwidth, bandwidth))


def roofline_of(model: PreTrainedModel) -> Roofline:
    """The model's products, counted; the rates are still to be measured."""
    head = model.get_output_embeddings().weight.numel()
    weights = sum(weight.numel() for weight in linear_weights(model)) - head
    return Roofline(rate=0, bandwidth=0, weights=weights, head=head)


def linear_weights(model: PreTrainedModel) -> Iterator[Tensor]:
    """Weights of all linear layers, the output head included."""
    yield from (module.weight for module in model.modules() if isinstance(module, nn.Linear))


def seconds_of_products(model: PreTrainedModel, rows: int) -> float:
    """Seconds that the linear layers take for `rows` tokens, one after the other, with nothing in between."""
    weights = list(linear_weights(model))
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=w.dtype) for w in weights}

    def products() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    with torch.inference_mode():
        return min(seconds(products) for _ in range(10))
