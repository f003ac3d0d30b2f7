"""Sections that actor, reference and critic share: FSDP, checkpoint contents, profiler."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tether.config.schema.section import Inherits, Section, Strings

SHORT = {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16"}
"""Short names of number formats."""


def _spelled_out(value: Any) -> Any:
    return SHORT.get(value.removeprefix("torch."), value.removeprefix("torch.")) if isinstance(value, str) else value


def _short(value: Any) -> Any:
    return {"float32": "fp32", "bfloat16": "bf16"}.get(_spelled_out(value), value) if isinstance(value, str) else value


Dtype = Annotated[Literal["bfloat16", "float32"], BeforeValidator(_spelled_out)]
MasterDtype = Annotated[Literal["fp32", "bf16"], BeforeValidator(_short)]


class WrapPolicyConfig(Section):
    """Which modules FSDP shards by themselves."""

    min_num_params: int = 0
    """Smallest module that is sharded by itself; 0: one shard group a transformer layer."""


class FsdpConfig(Section):
    """`*.fsdp_config`: number formats, and where FSDP keeps its shards."""

    dtype: Dtype = "bfloat16"
    """Number format of the forward and backward pass; weights and optimizer stay float32."""
    model_dtype: MasterDtype = "fp32"
    """Number format of the weights that the optimizer updates."""
    wrap_policy: WrapPolicyConfig
    param_offload: bool = False
    """Keep weights on the CPU between uses."""
    optimizer_offload: bool = False
    """Keep optimizer state on the CPU between uses."""
    offload_policy: bool = False
    """FSDP2: let FSDP move weights, gradients and optimizer state to the CPU."""
    reshard_after_forward: bool = True
    """FSDP2: free gathered weights after the forward pass."""
    fsdp_size: int = -1
    """Ranks a shard group; -1: all."""
    forward_prefetch: bool = False
    """Gather the next layer's weights early."""
    use_orig_params: bool = False
    """FSDP1: keep the original parameters visible."""
    seed: int = 42
    """verl's seed of the training engine."""
    full_determinism: bool = False
    """Deterministic kernels only."""
    ulysses_sequence_parallel_size: int = 1
    """Ranks that share one sequence."""
    entropy_from_logits_with_chunking: bool = False
    """Compute entropy a block of tokens at a time."""
    entropy_checkpointing: bool = False
    """Recompute entropy in the backward pass."""
    use_torch_compile: bool = True
    """Compile the model's small kernels."""
    forward_only: bool = False
    """No backward pass."""


class RefFsdpConfig(FsdpConfig):
    """The reference's: number formats follow the actor's, so that at the start both give the same log-probs."""

    dtype: Annotated[Dtype, Inherits("actor_rollout_ref.actor.fsdp_config.dtype")]
    """Number format of the reference's forward pass."""
    model_dtype: Annotated[MasterDtype, Inherits("actor_rollout_ref.actor.fsdp_config.model_dtype")]
    """Number format of the reference's weights."""
    forward_only: bool = True
    """No backward pass."""


class CheckpointConfig(Section):
    """`*.checkpoint`: what verl's checkpoints hold."""

    save_contents: Strings = ("model", "optimizer", "extra")
    """Parts that are saved: model, optimizer, extra (schedule and random state), hf_model."""
    load_contents: Annotated[Strings, Inherits(".save_contents")]
    """Parts that are loaded on resume."""
    async_save: bool = False
    """Save in the background."""


class ProfilerConfig(Section):
    """`*.profiler`: a worker's GPU profiler."""

    enable: bool = False
    """Profile this worker."""
    tool: Annotated[str | None, Inherits("global_profiler.tool")]
    """nsys, npu, torch or torch_memory."""
    all_ranks: bool = False
    """Profile every rank."""
    ranks: list[int] | None = Field(default_factory=list)
    """Ranks to profile."""
    save_path: Annotated[str | None, Inherits("global_profiler.save_path")]
    """Where traces go."""
    tool_config: dict[str, Any] | None = None
    """The tool's own options."""


class TiledMlpConfig(Section):
    """`model.tiled_mlp`: compute MLPs in pieces."""

    enabled: bool = False
    """Compute MLPs in pieces to save memory."""
    num_shards: int = 4
    """Number of pieces."""
