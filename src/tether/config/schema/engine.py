"""Number formats, sharding and Megatron's parallel sizes, in sections that actor, reference and critic share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from tether.config.schema.section import ActsIf, Inherits, Options, Positive, Refuses, Says, Section

SHORT = {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16"}
"""Short names of number formats."""


def _spelled_out(value: object) -> object:
    return SHORT.get(value.removeprefix("torch."), value.removeprefix("torch.")) if isinstance(value, str) else value


def _whole_number(value: int) -> int:
    if value == 0 or value < -1:
        raise ValueError("neither -1 nor above 0")
    return value


Dtype = Annotated[Literal["auto", "bfloat16", "float32"], BeforeValidator(_spelled_out)]
Reduce = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_spelled_out)]
Shards = Annotated[int, AfterValidator(_whole_number), Says("a whole number above 0 (-1: all)")]
_BESIDE = ActsIf(
    "actor_rollout_ref.rollout.nnodes", off=(0,), other=ActsIf("reward_model.enable_resource_pool", on=(True,))
)
ON_RANKS = ActsIf("trainer.n_gpus_per_node", off=(1,), other=ActsIf("trainer.nnodes", off=(1,), other=_BESIDE))
"""Has an effect if several devices train."""
STRATEGY = "actor_rollout_ref.actor.strategy"
"""Selects the engine for several devices, for all models of a run."""
IN_SHARDS = ActsIf(STRATEGY, off=("megatron",))
MEGATRON = ActsIf(STRATEGY, on=("megatron",))
FROM_MEGATRON = ActsIf(".use_dist_checkpointing", on=(True,))
Strategy = Annotated[
    Literal["fsdp", "fsdp2", "megatron", "veomni", "torchtitan", "automodel", "fsdp_turbo", "mindspeed", "mlite"],
    Refuses(
        ("veomni", "torchtitan", "automodel", "fsdp_turbo", "mindspeed", "mlite"),
        "of verl's engines there are FSDP2 and Megatron here",
    ),
]


class FsdpConfig(Section):
    """`*.fsdp_config`: the number format."""

    dtype: Dtype = "auto"
    """Number format of the forward and backward pass; auto: bfloat16 if the device supports it, else float32."""


class ShardConfig(FsdpConfig):
    """`*.fsdp_config`: the number format, and how several devices share the model."""

    fsdp_size: Annotated[Shards, IN_SHARDS] = -1
    """Devices per sharded copy of the weights; fewer than all devices: several copies; -1: all devices."""
    reshard_after_forward: Annotated[bool, IN_SHARDS] = True
    """Free a layer's gathered weights after its forward pass and gather them again: less memory, more communication."""
    param_offload: Annotated[bool, IN_SHARDS] = False
    """Keep the weights in host memory while the model does not run."""
    offload_policy: Annotated[bool, IN_SHARDS] = False
    """Keep weights, gradients and optimizer in host memory; a layer's weights are copied to the device when it runs."""


class RefFsdpConfig(ShardConfig):
    """The reference's; it inherits from the actor, so that both have the same log-probs at the start."""

    dtype: Annotated[Dtype, Inherits("actor_rollout_ref.actor.fsdp_config.dtype")]
    """Number format of the reference's forward pass."""


class MixedPrecisionConfig(Section):
    """`*.fsdp_config.mixed_precision`: number formats other than that of the forward and backward pass."""

    reduce_dtype: Annotated[Reduce, IN_SHARDS] = "float32"
    """Number format in which gradients are summed over devices."""


class TrainedFsdpConfig(ShardConfig):
    """`*.fsdp_config` of a model that is trained."""

    optimizer_offload: Annotated[bool, IN_SHARDS] = False
    """Keep the optimizer's state in host memory between updates."""
    mixed_precision: MixedPrecisionConfig


Replay = Literal["disabled", "R2", "R3"]


class RouterReplayConfig(Section):
    """`actor.router_replay`: reuse the experts that an earlier pass chose, for mixture-of-experts models."""

    mode: Replay = "disabled"
    """R2: the update routes tokens to the experts used for the old log-probs; R3: to those used by the sampler."""


class MegatronReplayConfig(Section):
    """`actor.megatron.router_replay`: the same for Megatron."""

    mode: Annotated[Replay, Inherits("actor_rollout_ref.actor.router_replay.mode")]
    """R2: the update routes tokens to the experts used for the old log-probs; R3: to those used by the sampler."""


class MegatronConfig(Section):
    """`actor.megatron`: how several devices share the model, and changes of Megatron's own config."""

    tensor_model_parallel_size: Positive = 1
    """Devices that share each layer's matrices; best within one machine."""
    pipeline_model_parallel_size: Positive = 1
    """Number of pipeline stages, which divide the layers."""
    virtual_pipeline_model_parallel_size: Positive | None = None
    """Model chunks per device of a pipeline, which are interleaved with those of the other devices: less idle time."""
    context_parallel_size: Positive = 1
    """Devices that share each sequence."""
    expert_model_parallel_size: Positive = 1
    """Devices over which the experts of a layer are distributed."""
    expert_tensor_parallel_size: Positive | None = None
    """Devices that share each expert's matrices; null: same as tensor_model_parallel_size."""
    sequence_parallel: bool = True
    """Tensor-parallel devices split the tokens in layers without tensor parallelism: less memory."""
    override_transformer_config: Options
    """Fields of Megatron's TransformerConfig to change, such as num_layers_in_first_pipeline_stage."""
    param_offload: bool = False
    """Keep the weights in host memory while the model does not run."""
    grad_offload: bool = False
    """Free the memory of the gradients between updates."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in host memory between updates."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer's state over data-parallel devices."""
    router_replay: MegatronReplayConfig
    use_dist_checkpointing: bool = False
    """Read the initial weights from dist_checkpointing_path; config and tokenizer still come from model.path."""
    dist_checkpointing_path: Annotated[str | None, FROM_MEGATRON] = None
    """Directory written by Megatron's dist_checkpointing in the format torch_dist."""
    dist_checkpointing_prefix: Annotated[str, FROM_MEGATRON] = ""
    """Prefix of all tensor names in that directory."""


def _actors(name: str) -> Inherits:
    return Inherits(f"actor_rollout_ref.actor.megatron.{name}")


class RefMegatronConfig(Section):
    """`ref.megatron`: inherits from the actor, whose devices the reference shares."""

    tensor_model_parallel_size: Annotated[Positive, _actors("tensor_model_parallel_size")]
    """Devices that share each layer's matrices."""
    pipeline_model_parallel_size: Annotated[Positive, _actors("pipeline_model_parallel_size")]
    """Number of pipeline stages."""
    virtual_pipeline_model_parallel_size: Annotated[Positive | None, _actors("virtual_pipeline_model_parallel_size")]
    """Model chunks per device of a pipeline."""
    context_parallel_size: Annotated[Positive, _actors("context_parallel_size")]
    """Devices that share each sequence."""
    expert_model_parallel_size: Annotated[Positive, _actors("expert_model_parallel_size")]
    """Devices over which the experts of a layer are distributed."""
    expert_tensor_parallel_size: Annotated[Positive | None, _actors("expert_tensor_parallel_size")]
    """Devices that share each expert's matrices."""
    sequence_parallel: Annotated[bool, _actors("sequence_parallel")]
    """Tensor-parallel devices split the tokens in layers without tensor parallelism."""
    override_transformer_config: Annotated[
        dict[str, object], Says("a {key: value} mapping"), _actors("override_transformer_config")
    ]
    """Fields of Megatron's TransformerConfig to change."""
    param_offload: Annotated[bool, _actors("param_offload")]
    """Keep the weights in host memory while the model does not run."""
    use_dist_checkpointing: Annotated[bool, _actors("use_dist_checkpointing")]
    """Read the weights from dist_checkpointing_path."""
    dist_checkpointing_path: Annotated[str | None, FROM_MEGATRON, _actors("dist_checkpointing_path")]
    """Directory written by Megatron's dist_checkpointing in the format torch_dist."""
    dist_checkpointing_prefix: Annotated[str, FROM_MEGATRON, _actors("dist_checkpointing_prefix")]
    """Prefix of all tensor names in that directory."""


class CriticMegatronConfig(RefMegatronConfig):
    """`critic.megatron`: inherits from the actor, whose devices the critic shares."""

    grad_offload: Annotated[bool, _actors("grad_offload")]
    """Free the memory of the gradients between updates."""
    optimizer_offload: Annotated[bool, _actors("optimizer_offload")]
    """Keep the optimizer's state in host memory between updates."""
    use_distributed_optimizer: Annotated[bool, _actors("use_distributed_optimizer")]
    """Shard the optimizer's state over data-parallel devices."""
    use_dist_checkpointing: bool = False
    """Read the initial weights from dist_checkpointing_path; config and tokenizer still come from model.path."""
    dist_checkpointing_path: Annotated[str | None, FROM_MEGATRON] = None
    """Directory written by Megatron's dist_checkpointing in the format torch_dist."""
    dist_checkpointing_prefix: Annotated[str, FROM_MEGATRON] = ""
    """Prefix of all tensor names in that directory."""
