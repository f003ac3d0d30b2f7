"""Memory of a device in each phase of a step, by component. All formulas count bytes.

Legend: N = weights of a model, R = those outside of its layers (embedding and head), L = those of its largest layer,
V = vocabulary, H = hidden size, I = MLP width, T = tokens in a micro-batch, s = shards, c = bytes of a number in the
forward pass (2 in bfloat16, 4 in float32).

The resident state of engines follows their code: `tether.text.learning.engines` (masters, gradients and moments in
float32), `tether.text.sampling.kv_cache`, `tether.kernels.vocabulary_chunks`. Activations are the tensors that PyTorch
saves for the backward pass of a transformers layer. ``python -m benchmarks.plan`` compares the totals with allocated
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tether.plan.architecture import Architecture

Parts = dict[str, float]
"""Name of a component -> its bytes."""
MASTER, SUM, MOMENTS = 4, 4, 8
"""Bytes per weight of a float32 weight, of its summed gradient, and of AdamW's two moments."""
LOGITS_AT_ONCE = {"cpu": 1 << 21, "gpu": 1 << 26}
"""Number of logits in a chunk of the vocabulary (`tether.kernels.vocabulary_chunks.default_chunk_size`)."""
PER_LOGIT = 14
"""Bytes per logit in the backward pass: float32 logits, probabilities and gradient, and the gradient in bfloat16."""
PREFILLED = 8192
"""Maximum prompt tokens that the native engine prefills at once, unless a single prompt is longer
(`tether.text.sampling.engine.NativeEngine`)."""
MIB, GIB = 2**20, 2**30


class Layout(Protocol):
    """The parallel sizes of a model that Megatron trains (`tether.integrations.megatron.layout.MegatronLayout`)."""

    @property
    def tensor(self) -> int: ...
    @property
    def pipeline(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def expert_ranks(self) -> int: ...
    @property
    def sequence_parallel(self) -> bool: ...
    def layers_by_stage(self, layers: int) -> list[int]: ...


@dataclass(frozen=True)
class Model:
    """A model of a run, with its distribution over devices."""

    role: str
    sizes: Architecture
    ranks: int = 1
    """Number of devices that hold the model."""
    shards: int = 1
    """Number of devices that share one copy with FSDP2; with one device it is not sharded."""
    sharded: bool = False
    layout: Layout | None = None
    """Megatron's parallel sizes; None: FSDP2, or one device."""
    trained: bool = True
    has_head: bool = True
    """Whether it has an output head; a critic or a reward model has a vector instead."""
    number: int = 2
    """Bytes of a number in the forward pass (c in the legend)."""
    adapter: int = 0
    """Number of weights of LoRA adapters; 0: all weights are trained."""
    recompute: bool = True
    fused: bool = False
    """Whether norms and MLPs are fused into one kernel each, which saves fewer tensors for the backward pass."""
    on_cpu: bool = False
    sequence: int = 1
    """Number of devices that share each row of tokens (sequence parallelism)."""
    reshard: bool = True
    offload_weights: bool = False
    gradients_are_freed: bool = True
    offload_optimizer: bool = False
    on_host: bool = False
    """Whether weights, gradients and optimizer state are always in host memory."""
    shares_optimizer: bool = True
    """Whether Megatron's distributed optimizer is used."""
    whole_logits: bool = False
    """Whether all logits of a micro-batch exist at once, as in engines that do not split the vocabulary into chunks."""

    @property
    def parameters(self) -> int:
        """Number of weights (N in the legend)."""
        return self.sizes.parameters if self.has_head else self.sizes.critic_parameters

    @property
    def outside(self) -> int:
        """Number of weights outside of the layers (R in the legend)."""
        return self.parameters - self.sizes.in_layers

    @property
    def trained_weights(self) -> int:
        """Number of weights that are trained."""
        return (self.adapter or self.parameters) if self.trained else 0

    @property
    def total_weights(self) -> int:
        """Number of weights including the adapters."""
        return self.parameters + self.adapter


def megatron_rank_weights(
    sizes: Architecture, layout: Layout, ranks: int, *, has_head: bool = True
) -> list[tuple[float, int]]:
    """Return the weights of the fullest rank as pairs: a number of weights, and how many ranks hold the same weights.

    Tensor parallelism divides matrices, embedding and head; pipeline parallelism divides the layers, with the
    embedding on the first stage and the head on the last; expert parallelism divides the experts, which are replicated
    on as many ranks as expert, expert-tensor and pipeline parallelism leave.
    """
    vocabulary, first = sizes.embedding / layout.tensor, sizes.dense_layers
    router = (sizes.experts * sizes.hidden) + (sizes.hidden if sizes.shared_gate else 0) if sizes.experts else 0

    def shared(index: int) -> float:
        wide = sizes.intermediate if not sizes.experts or index < first else sizes.shared_width
        matrices = sizes.attention + 3 * sizes.hidden * wide
        return matrices / layout.tensor + sizes.small + (router if index >= first else 0)

    results, start = [], 0
    counts = layout.layers_by_stage(sizes.layers)
    for stage, count in enumerate(counts):
        layers = range(start, start + count)
        start += count
        dense = sum(map(shared, layers))
        dense += vocabulary if stage == 0 else 0
        dense += (vocabulary if has_head else sizes.hidden) + sizes.hidden if stage == len(counts) - 1 else 0
        mixtures = sum(1 for index in layers if sizes.experts and index >= first)
        experts = mixtures * sizes.experts * sizes.expert / (layout.expert * layout.expert_ranks)
        holders = ranks // (layout.tensor * layout.pipeline)
        of_experts = ranks // (layout.expert * layout.expert_ranks * layout.pipeline)
        results.append([(dense, holders), (experts, max(1, of_experts))])
    return max(results, key=lambda pairs: sum(number for number, _ in pairs))


def megatron_state(sizes: Architecture, layout: Layout, ranks: int, number: int) -> float:
    """Return the bytes of weights, summed gradients and optimizer on the fullest rank, with the distributed optimizer.

    A weight takes c bytes, 4 for its summed gradient, 8 for two moments, and 4 for a float32 master if c is 2; moments
    and master are sharded over the ranks that hold the same weight.
    """
    optimizer_bytes = MOMENTS + (MASTER if number == 2 else 0)
    return sum(
        count * (number + SUM + optimizer_bytes / holders)
        for count, holders in megatron_rank_weights(sizes, layout, ranks)
    )


def _megatron_adapter(model: Model) -> list[tuple[float, int]]:
    """Return the pairs of `megatron_rank_weights` for adapters on all linear layers; empty without adapters."""
    sizes, layout = model.sizes, model.layout
    assert layout
    if not model.adapter:
        return []
    rank, fullest = model.adapter / sizes.adapter(1), max(layout.layers_by_stage(sizes.layers))
    number = rank * sizes.adapter(1, layout.tensor) * fullest / sizes.layers
    return [(number, model.ranks // (layout.tensor * layout.pipeline))]


def idle_memory(model: Model) -> tuple[Parts, Parts]:
    """Return what a model keeps in device memory and in host memory while it is not running."""
    device, host, role = Parts(), Parts(), model.role
    weights = host if model.on_host or model.offload_weights else device
    optimizer = host if model.on_host or model.offload_optimizer else device
    if model.layout:
        pairs = megatron_rank_weights(model.sizes, model.layout, model.ranks, has_head=model.has_head)
        adapter = _megatron_adapter(model)
        weights[f"{role} weights"] = model.number * sum(number for number, _ in pairs + adapter)
        if model.trained:
            learned = adapter or pairs
            optimizer_bytes = MOMENTS + (MASTER if model.number == 2 else 0)
            shared = sum(number / (holders if model.shares_optimizer else 1) for number, holders in learned)
            optimizer[f"{role} optimizer"] = optimizer_bytes * shared
            if not model.gradients_are_freed:
                device[f"{role} gradients"] = SUM * sum(number for number, _ in learned)
        return device, host
    shards = model.shards if model.sharded else 1
    if model.sharded:
        weights[f"{role} weights"] = model.total_weights * (MASTER if model.trained else model.number) / shards
    else:
        weights[f"{role} weights"] = model.total_weights * model.number
        if model.trained and model.number == 2:
            weights[f"{role} masters"] = MASTER * model.trained_weights
    if model.trained:
        optimizer[f"{role} optimizer"] = MOMENTS * model.trained_weights / shards
    return device, host


def _loaded_from_host(model: Model) -> Parts:
    """Return the components that are moved from the host to the device while the model runs."""
    if not model.offload_weights or model.on_host:
        return {}
    return {name: size for name, size in idle_memory(model)[1].items() if "optimizer" not in name}


def saved_per_token(model: Model) -> float:
    """Return the bytes that a layer saves for its backward pass, per token."""
    sizes, c = model.sizes, model.number
    queries, keys = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    norm = (2 if model.fused else 4 if c == 2 else 3) * c * sizes.hidden  # the unfused norm also saves a float32 copy
    attention = c * (2 * queries + 2 * keys) + 4 * sizes.heads
    if sizes.qk_norm:
        attention += (1 if model.fused else 3) * c * (queries + keys)
    fused = 3 if model.adapter else 2  # an adapter of the last product also needs its input
    mlp = (fused if model.fused else 4) * c * sizes.mlp_width
    if not model.fused:
        attention += c * queries  # the heads' outputs, saved again as the input of a product
    if sizes.experts:
        mlp += 3 * c * sizes.active_experts * sizes.hidden  # each token's inputs and outputs at its experts
    if not model.layout:
        return sizes.norms * norm + attention + mlp
    tensor = model.layout.tensor
    return sizes.norms * norm / (tensor if model.layout.sequence_parallel else 1) + (attention + mlp) / tensor


def _transient(model: Model) -> float:
    """Return the bytes of a layer's temporary tensors per token: those of the MLP and the residual stream."""
    tensor = model.layout.tensor if model.layout else 1
    return model.number * (3 * model.sizes.mlp_width / tensor + 2 * model.sizes.hidden)


def logits(model: Model, tokens: float, *, update: bool) -> float:
    """Return the bytes of the logits that exist at the same time; a critic has none."""
    if not model.has_head:
        return 0.0
    vocabulary = model.sizes.vocabulary / (model.layout.tensor if model.layout else 1)
    each = PER_LOGIT if update else 10
    if model.whole_logits:  # also in bfloat16 before the cast, and again in the softmax's backward pass
        return (each + 5) * tokens * vocabulary
    limit = LOGITS_AT_ONCE["cpu" if model.on_cpu else "gpu"]
    return each * tokens * min(vocabulary, max(256.0, limit / max(1.0, tokens)))


def inference(model: Model, tokens: float) -> Parts:
    """Return the memory that a forward pass without gradients needs in addition to the model's resident state."""
    tokens, role = tokens / model.sequence, model.role
    components = _loaded_from_host(model)
    components[f"{role} activations"] = tokens * (_transient(model) + 3 * model.number * model.sizes.hidden)
    components[f"{role} logits"] = logits(model, tokens, update=False)
    if model.sharded:
        components[f"{role} gathered weights"] = model.number * (model.outside + 2 * model.sizes.largest_layer)
    return components


def update(model: Model, tokens: float, in_flight: int = 1) -> Parts:
    """Return the memory that an update needs in addition to the resident state, at the peak of the backward pass.

    Args:
        model: the model.
        tokens: tokens in a micro-batch.
        in_flight: number of micro-batches whose activations the first pipeline stage stores.
    """
    moments = _moments(model, tokens / model.sequence, in_flight)
    largest = max(moments, key=lambda components: sum(components.values()))
    components = _loaded_from_host(model) | _gradients(model)
    if model.offload_optimizer and not model.on_host:
        components |= {name: size for name, size in idle_memory(model)[1].items() if "optimizer" in name}
    return components | {f"{model.role} {name}": size for name, size in largest.items() if size}


def _gradients(model: Model) -> Parts:
    """Return the summed gradients on the device, unless `idle_memory` counts them."""
    name = f"{model.role} gradients"
    if model.layout:
        pairs = megatron_rank_weights(model.sizes, model.layout, model.ranks, has_head=model.has_head)
        learned = sum(number for number, _ in _megatron_adapter(model) or pairs)
        return {name: SUM * learned} if model.gradients_are_freed else {}
    if model.on_host:
        return {}
    return {name: SUM * model.trained_weights / (model.shards if model.sharded else 1)}


def _moments(model: Model, tokens: float, in_flight: int) -> list[Parts]:
    """Return the components at the loss, in the first layer's backward pass, and when the embedding's gradient is
    summed."""
    sizes, c = model.sizes, model.number
    layers = max(model.layout.layers_by_stage(sizes.layers)) if model.layout else sizes.layers
    boundary = c * sizes.hidden / (model.layout.tensor if model.layout and model.layout.sequence_parallel else 1)
    if model.recompute:
        retained, active = tokens * boundary * layers * in_flight, tokens * saved_per_token(model)
    else:
        retained, active = tokens * saved_per_token(model) * layers * in_flight, 0.0
    full = not model.adapter
    head = sizes.embedding if model.has_head and not model.layout else 0
    embedding = 0 if model.layout else sizes.embedding
    head_gradient = c * head if full else 0.0
    at_loss = {
        "activations": retained + tokens * (2 * boundary + 8 * sizes.hidden),
        "logits": logits(model, tokens, update=True),
        "whole gradients": head_gradient,
    }
    # Gradients of each token's inputs and outputs at its experts, and copies of them; the factor 6 was derived from
    # prime-rl's 30B mixture.
    at_experts = 6 * c * sizes.active_experts * sizes.hidden
    in_layer = {
        "activations": retained + active + tokens * (_transient(model) + at_experts),
        "whole gradients": head_gradient if model.sharded or sizes.tied else 0.0,
    }
    at_end = {
        "activations": tokens * 2 * boundary,
        "whole gradients": c * (head + embedding) * (1 if model.sharded or sizes.tied else 0.5) if full else 0.0,
    }
    if not model.sharded:
        return [at_loss, in_layer, at_end]
    outside, layer = model.outside, sizes.largest_layer
    at_loss["gathered weights"] = c * (outside + layer)
    in_layer["gathered weights"] = c * (outside + 2 * layer)
    if full:
        in_layer["whole gradients"] += c * layer
        in_layer["sums over devices"] = MASTER * layer
        at_end["whole gradients"] = c * outside
        at_end["sums over devices"] = MASTER * outside
    return [at_loss, in_layer, at_end]


def kv_cache(sizes: Architecture, slots: int, length: int, number: int) -> float:
    """Return the bytes of keys and values of concurrently sampled sequences, all at their maximum length."""
    return slots * -(-length // 32) * 32 * sizes.kv_per_token * number


def total(components: Mapping[str, float]) -> float:
    """Return the sum of all components."""
    return sum(components.values())
