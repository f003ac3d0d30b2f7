"""Sections that actor, reference and critic share: FSDP, Megatron, checkpoint contents, profiler, router replay."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tether.config.schema.section import Inherits, Options, Section, Strings

Strategy = Literal["fsdp", "fsdp2", "megatron"]
Dtype = Literal["bfloat16", "float32"]
MasterDtype = Literal["fp32", "bf16"]


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
    strategy: Strategy = "fsdp"
    """FSDP version."""


class RefFsdpConfig(FsdpConfig):
    """The reference's: number formats follow the actor's, so that at the start both give the same log-probs."""

    dtype: Annotated[Dtype, Inherits("actor_rollout_ref.actor.fsdp_config.dtype")]
    """Number format of the reference's forward pass."""
    model_dtype: Annotated[MasterDtype, Inherits("actor_rollout_ref.actor.fsdp_config.model_dtype")]
    """Number format of the reference's weights."""
    forward_only: bool = True
    """No backward pass."""


class MegatronConfig(Section):
    """`*.megatron`: how Megatron-core splits a model."""

    tensor_model_parallel_size: int = 1
    """Ranks that split each matrix."""
    pipeline_model_parallel_size: int = 1
    """Ranks that split the layers."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Layer blocks a pipeline rank."""
    expert_model_parallel_size: int = 1
    """Ranks that split the experts."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that split each expert's matrices."""
    context_parallel_size: int = 1
    """Ranks that split each sequence."""
    sequence_parallel: bool = True
    """Split activations along the sequence between tensor-parallel ranks."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""
    param_offload: bool = False
    """Keep weights on the CPU between uses."""
    grad_offload: bool = False
    """Keep gradients on the CPU between uses."""
    optimizer_offload: bool = False
    """Keep optimizer state on the CPU between uses."""
    use_dist_checkpointing: bool = False
    """Load weights from a Megatron checkpoint."""
    dist_checkpointing_path: str | None = None
    """That checkpoint."""
    dist_checkpointing_prefix: str = ""
    """Prefix of the names in it."""
    seed: int = 42
    """verl's seed of Megatron's engine."""
    override_ddp_config: Options
    """More arguments of Megatron's data parallelism."""
    override_transformer_config: Options
    """More arguments of Megatron's transformer."""
    override_mcore_model_config: Options
    """More arguments of Megatron's model."""
    use_mbridge: bool = True
    """Convert weights by mbridge."""
    vanilla_mbridge: bool = True
    """Which mbridge."""
    use_remove_padding: bool = True
    """Pack sequences."""
    forward_only: bool = False
    """No backward pass."""
    dtype: Dtype = "bfloat16"
    """Number format of the forward and backward pass."""


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


class RouterReplayConfig(Section):
    """`*.router_replay`: replay of the experts that a mixture-of-experts model chose."""

    mode: str = "disabled"
    """disabled, or what is recorded and replayed."""
    record_file: str | None = None
    """Where choices are recorded."""
    replay_file: str | None = None
    """Choices to replay."""


class TiledMlpConfig(Section):
    """`model.tiled_mlp`: compute MLPs in pieces."""

    enabled: bool = False
    """Compute MLPs in pieces to save memory."""
    num_shards: int = 4
    """Number of pieces."""
