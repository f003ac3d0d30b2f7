"""Time of each phase of a step: a roofline with efficiencies that have a source, and a simulation of sampling.

A phase takes as long as its products at the device's rate, or its bytes at the rate of memory or of the links, times
what is usually lost. Each result is an interval, because that loss varies.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from tether.plan.architecture import Architecture
from tether.plan.devices import Cluster, Device
from tether.plan.memory import MASTER, SUM, Model, at_rest

SPREAD = (0.7, 1.45)
"""Uncalibrated, a phase takes between these multiples of its estimate."""
CALIBRATED = (0.85, 1.2)
"""The same after a run on the machine was compared."""
TAIL = 0.99
"""The quantile of the lengths that is asked for."""
HOST_BANDWIDTH = 25.0
"""GB/s of the host's memory for each device: two channels of DDR5 for two devices, a server's sixteen for eight."""
DRAWN = 4096
"""Most lengths that are simulated; more sequences are in proportion."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's rates that are reached."""

    products: float
    """The share of dense products, for a model with a large hidden size."""
    half_at: float
    """Hidden size at which half of that is reached, on a device of `FASTEST` TFLOP/s; on slower ones a smaller one."""
    attention: float
    """The share of the products of attention, which do not depend on the hidden size."""
    bandwidth: float
    """The share of the memory's rate while a token is decoded."""
    decoding: float
    """The share of `products` while many rows are decoded."""
    per_layer: float
    """Seconds of a layer of a decoded token that no roofline has: launches."""
    source: str

    def of_products(self, hidden: int, device: Device) -> float:
        """Return the share for a model of a hidden size."""
        return self.products * hidden / (hidden + self.half_at * device.teraflops / FASTEST)


FASTEST = 989
"""TFLOP/s of the device that `Efficiency.half_at` was read off: an H100."""
CPU = Efficiency(
    0.95, 340 * FASTEST / 0.4, 0.5, 0.42, 1.1, 0.0,
    "the page on performance: of the limit, training SmolLM2-135M reaches 59 to 61 % at 0.4 TFLOP/s and 15 to 21 % at "
    "1.9, decoding 42 % with one row; a run of Qwen2.5-0.5B with LoRA at 0.4: 70 %, decoding 76 %",
)  # fmt: skip
GPU = Efficiency(
    0.6, 6000, 0.45, 0.6, 1.0, 1.3e-4,
    "prime-rl's benchmarks (Qwen3-0.6B at 16k and 65k tokens on an H100, 16k on an A6000); decoding: "
    "the page on GPUs, 3.7 to 5.3 ms for 24 to 30 layers on an H200",
)  # fmt: skip
SERVER = replace(GPU, per_layer=3e-5, source="as GPU; vLLM's CUDA graphs leave about 1 ms a token for 30 layers")


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and responses. The mean and the 99 % quantile of responses cannot be known before a run."""

    prompt: float
    mean: float
    tail: float
    limit: int
    """Most tokens of a response."""

    def draw(self, count: int, seed: int = 0) -> list[int]:
        """Draw lengths of responses from a log-normal distribution with this mean and quantile, cut at the limit."""
        ratio = max(1.0, self.tail / self.mean)
        z = NormalDist().inv_cdf(TAIL)
        # tail / mean = exp(z sigma - sigma^2 / 2), of which the smaller root is the distribution that is meant.
        sigma = z - math.sqrt(max(0.0, z * z - 2 * math.log(ratio)))
        mu = math.log(self.mean) - sigma**2 / 2
        draw = random.Random(seed)
        return [max(1, min(self.limit, round(draw.lognormvariate(mu, sigma)))) for _ in range(count)]


@dataclass(frozen=True)
class Sampled:
    """A simulated rollout of one sampler."""

    seconds: float
    idle: float
    """Share of its slots x time in which no sequence was sampled."""


def simulate(lengths: Sequence[int], slots: int, step: Callable[[int, float], float], prompt: float) -> Sampled:
    """Simulate continuous batching: a sequence that ends makes room for the next one.

    Args:
        lengths: tokens of each response.
        slots: sequences that are sampled at a time.
        step: seconds of a decoded token for so many rows, each of so many tokens.
        prompt: tokens of a prompt.
    """
    waiting = list(reversed(lengths))
    ends: list[int] = []  # decoding step in which a sequence ends
    while waiting and len(ends) < slots:
        heapq.heappush(ends, waiting.pop())
    slots = len(ends)
    now, seconds, used = 0, 0.0, 0.0
    length = prompt + sum(lengths) / len(lengths) / 2 if lengths else 0.0
    while ends:
        first, rows = ends[0], len(ends)
        took = (first - now) * step(rows, length)
        seconds, used, now = seconds + took, used + took * rows, first
        while ends and ends[0] == now:
            heapq.heappop(ends)
            if waiting:
                heapq.heappush(ends, now + waiting.pop())
    return Sampled(seconds, 1 - used / (slots * seconds) if seconds else 0.0)


def decode_step(model: Model, device: Device, efficiency: Efficiency, shards: int = 1) -> Callable[[int, float], float]:
    """Return the seconds of one decoded token for so many rows with so many tokens each.

    Args:
        model: the policy.
        device: a device that samples.
        efficiency: what is reached of its rates.
        shards: devices that share the sampler's model.
    """
    sizes, c = model.sizes, model.number
    weights = sizes.active_in_layers + sizes.embedding
    rate = device.teraflops * 1e12 * efficiency.of_products(sizes.hidden, device) * efficiency.decoding

    def seconds(rows: int, length: float) -> float:
        read: float = weights
        if sizes.experts:  # each row has its own experts, until all of them are read
            share = 1 - (1 - sizes.active_experts / sizes.experts) ** rows
            read = sizes.embedding + sizes.in_layers * share + sizes.attention * sizes.layers * (1 - share)
        cache = rows * length * sizes.kv_per_token
        memory = c * (read + cache) / (device.bandwidth * 1e9 * efficiency.bandwidth)
        products = 2 * rows * weights / rate
        return max(memory, products) / shards + efficiency.per_layer * sizes.layers

    return seconds


def forward_seconds(
    sizes: Architecture, tokens: float, pairs: float, targets: float, device: Device, efficiency: Efficiency
) -> float:
    """Return the seconds of a forward pass on one device.

    Args:
        sizes: the model's.
        tokens: tokens in the layers.
        pairs: pairs of tokens of which one sees the other.
        targets: tokens whose logits are computed; 0 for a critic.
        device: the device.
        efficiency: what is reached of its rates.
    """
    products = 2 * sizes.active_in_layers * tokens + 2 * sizes.embedding * targets
    attention = 4 * sizes.heads * sizes.head_size * sizes.layers * pairs
    rate = device.teraflops * 1e12
    return products / (rate * efficiency.of_products(sizes.hidden, device)) + attention / (rate * efficiency.attention)


def gather_seconds(model: Model, cluster: Cluster, passes: float, sums: float) -> float:
    """Return the seconds in which weights are gathered and gradients are summed over the shards.

    Args:
        model: a sharded model.
        cluster: its devices.
        passes: how often all weights are gathered.
        sums: how often all gradients are summed.
    """
    if not model.sharded or model.shards == 1:
        return 0.0
    device = cluster.device
    # Between machines each device sends its part; within one the links are faster.
    rate = device.link if model.shards <= cluster.per_node else device.network
    share = (model.shards - 1) / model.shards
    return share * (passes * model.number * model.parameters + sums * SUM * model.learned) / (rate * 1e9)


def bus_seconds(model: Model, device: Device, passes: float, sums: float) -> float:
    """Return the seconds in which weights that are always on the host are read from there, and gradients written back.

    FSDP2 with a `CPUOffloadPolicy` copies a rank's shard in the dtype in which it is stored, before it is gathered, and
    its share of the summed gradients in float32.

    Args:
        model: the model.
        device: its device.
        passes: how often all weights are gathered.
        sums: how often all gradients are summed.
    """
    if not model.on_host or device.is_cpu:
        return 0.0
    stored = MASTER if model.trained else model.number
    return (passes * stored * model.held + sums * SUM * model.learned) / model.shards / (device.bus * 1e9)


def move_seconds(model: Model, device: Device, *, update: bool) -> float:
    """Return the seconds in which a model that rests on the host is moved to its device and back, once for each phase.

    The optimizer's state is moved for an update only.
    """
    if model.on_host or device.is_cpu:
        return 0.0
    parts = at_rest(model)[1].items()
    moved = sum(size for name, size in parts if update or not name.endswith("optimizer"))
    return 2 * moved / (device.bus * 1e9)


def optimizer_seconds(model: Model, device: Device, shards: int) -> float:
    """Return the seconds of AdamW's step, which reads and writes weight, gradient and moments in float32."""
    rate = HOST_BANDWIDTH if model.on_host and not device.is_cpu else 0.5 * device.bandwidth
    return 28 * model.learned / shards / (rate * 1e9)


def overlapped(products: float, sent: float) -> float:
    """Return the seconds of products beside which data is sent, most of it at the same time."""
    return max(products, sent) + 0.15 * min(products, sent)
