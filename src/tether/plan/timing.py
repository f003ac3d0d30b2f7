"""Time of each phase of a step: a roofline with efficiencies that have a source, and a simulation of sampling.

A phase takes as long as its matrix products at the device's rate, or its bytes at the bandwidth of memory or links,
divided by the efficiency that is usually reached. Each result is an interval, because that efficiency varies.
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
from tether.plan.memory import MASTER, SUM, Model, idle_memory

SPREAD = (0.7, 1.45)
"""Range of a phase's time relative to its estimate, without calibration."""
CALIBRATED = (0.85, 1.2)
"""Range of a phase's time relative to its estimate, after comparison with a run on the machine."""
TAIL = 0.99
"""Quantile of the response lengths that users are asked for."""
HOST_BANDWIDTH = 25.0
"""Host memory bandwidth per device in GB/s: two channels of DDR5 for two devices, a server's sixteen for eight."""
DRAWN = 4096
"""Maximum number of lengths to simulate; results for more sequences are scaled."""


@dataclass(frozen=True)
class Efficiency:
    """Efficiencies: the reached shares of a device's rates."""

    products: float
    """Share reached by dense products, for a model with a large hidden size."""
    half_at: float
    """Hidden size at which half of `products` is reached on a device of `FASTEST` TFLOP/s; lower on slower devices."""
    attention: float
    """Share reached by the products of attention, which does not depend on the hidden size."""
    bandwidth: float
    """Share of the memory bandwidth reached while decoding a token."""
    decoding: float
    """Share of `products` reached while decoding many rows."""
    per_layer: float
    """Seconds per layer and decoded token that the roofline does not include, such as kernel launches."""
    source: str

    def dense_share(self, hidden: int, device: Device) -> float:
        """Return the share reached by dense products for a hidden size."""
        return self.products * hidden / (hidden + self.half_at * device.teraflops / FASTEST)


FASTEST = 989
"""TFLOP/s of the device for which `Efficiency.half_at` is given: an H100."""
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
    """Tokens of prompts and responses. The mean and the 99 % quantile of responses are unknown before a run."""

    prompt: float
    mean: float
    tail: float
    limit: int
    """Maximum tokens of a response."""

    def draw(self, count: int, seed: int = 0) -> list[int]:
        """Draw lengths of responses from a log-normal distribution with this mean and quantile, cut at the limit."""
        ratio = max(1.0, self.tail / self.mean)
        z = NormalDist().inv_cdf(TAIL)
        # tail / mean = exp(z sigma - sigma^2 / 2) has two roots; the smaller one is the intended distribution.
        sigma = z - math.sqrt(max(0.0, z * z - 2 * math.log(ratio)))
        mu = math.log(self.mean) - sigma**2 / 2
        draw = random.Random(seed)
        return [max(1, min(self.limit, round(draw.lognormvariate(mu, sigma)))) for _ in range(count)]


@dataclass(frozen=True)
class Sampled:
    """The simulated rollout of one sampler."""

    seconds: float
    idle: float
    """Idle share of its slots x time."""


def simulate(lengths: Sequence[int], slots: int, step: Callable[[int, float], float], prompt: float) -> Sampled:
    """Simulate continuous batching, in which the next sequence starts when one ends.

    Args:
        lengths: tokens of each response.
        slots: number of sequences sampled at the same time.
        step: returns the seconds of a decoding step, called with (rows, mean tokens per row).
        prompt: tokens of a prompt.
    """
    waiting = list(reversed(lengths))
    ends: list[int] = []  # decoding steps at which sequences end
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
    """Return a function from (rows, tokens per row) to the seconds of a decoding step.

    Args:
        model: the policy.
        device: a device that samples.
        efficiency: the reached shares of its rates.
        shards: devices that share the sampler's model.
    """
    sizes, c = model.sizes, model.number
    weights = sizes.active_in_layers + sizes.embedding
    rate = device.teraflops * 1e12 * efficiency.dense_share(sizes.hidden, device) * efficiency.decoding

    def seconds(rows: int, length: float) -> float:
        read: float = weights
        if sizes.experts:  # rows activate different experts, until all of them are read
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
        sizes: sizes of the model.
        tokens: tokens in the layers.
        pairs: pairs of tokens of which one attends to the other.
        targets: tokens whose logits are computed; 0 for a critic.
        device: the device.
        efficiency: the reached shares of its rates.
    """
    products = 2 * sizes.active_in_layers * tokens + 2 * sizes.embedding * targets
    attention = 4 * sizes.heads * sizes.head_size * sizes.layers * pairs
    rate = device.teraflops * 1e12
    return products / (rate * efficiency.dense_share(sizes.hidden, device)) + attention / (rate * efficiency.attention)


def gather_seconds(model: Model, cluster: Cluster, passes: float, sums: float) -> float:
    """Return the seconds for gathering weights and summing gradients over the shards.

    Args:
        model: a sharded model.
        cluster: its devices.
        passes: number of times that all weights are gathered.
        sums: number of times that all gradients are summed.
    """
    if not model.sharded or model.shards == 1:
        return 0.0
    device = cluster.device
    # Between machines, each device sends its own shard over the network; within a machine the links are faster.
    rate = device.link if model.shards <= cluster.per_node else device.network
    share = (model.shards - 1) / model.shards
    return share * (passes * model.number * model.parameters + sums * SUM * model.trained_weights) / (rate * 1e9)


def bus_seconds(model: Model, device: Device, passes: float, sums: float) -> float:
    """Return the seconds for reading weights that are always on the host, and for writing gradients back.

    FSDP2 with a `CPUOffloadPolicy` copies a rank's shard in the dtype in which it is stored, before it is gathered, and
    its share of the summed gradients in float32.

    Args:
        model: the model.
        device: its device.
        passes: number of times that all weights are gathered.
        sums: number of times that all gradients are summed.
    """
    if not model.on_host or device.is_cpu:
        return 0.0
    stored = MASTER if model.trained else model.number
    return (
        (passes * stored * model.total_weights + sums * SUM * model.trained_weights) / model.shards / (device.bus * 1e9)
    )


def move_seconds(model: Model, device: Device, *, update: bool) -> float:
    """Return the seconds per phase for moving an offloaded model to its device and back.

    The optimizer's state is only moved for an update.
    """
    if model.on_host or device.is_cpu:
        return 0.0
    parts = idle_memory(model)[1].items()
    moved = sum(size for name, size in parts if update or not name.endswith("optimizer"))
    return 2 * moved / (device.bus * 1e9)


def optimizer_seconds(model: Model, device: Device, shards: int) -> float:
    """Return the seconds of AdamW's step, which reads and writes weights, gradients and moments in float32."""
    rate = HOST_BANDWIDTH if model.on_host and not device.is_cpu else 0.5 * device.bandwidth
    return 28 * model.trained_weights / shards / (rate * 1e9)


def overlapped(products: float, sent: float) -> float:
    """Return the seconds of computation and communication that mostly overlap."""
    return max(products, sent) + 0.15 * min(products, sent)
