"""Number formats, shards and Megatron's parallel sizes, in the sections that actor, reference and critic share."""

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
"""Acts where several devices train."""
STRATEGY = "actor_rollout_ref.actor.strategy"
"""Chooses the engine of several devices for all models of a run."""
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
    """Number format of the forward and backward pass; auto: bfloat16 where the device computes in it, else float32."""


class ShardConfig(FsdpConfig):
    """`*.fsdp_config`: the number format, and how several devices share the model."""

    fsdp_size: Annotated[Shards, IN_SHARDS] = -1
    """Devices among which the weights are cut; fewer than there are: so many copies of the model; -1: all devices."""
    reshard_after_forward: Annotated[bool, IN_SHARDS] = True
    """Gather a layer's weights again for the backward pass: less memory, more to send."""
    param_offload: Annotated[bool, IN_SHARDS] = False
    """Keep the weights in the host's memory while the model does not run."""
    offload_policy: Annotated[bool, IN_SHARDS] = False
    """Keep weights, gradients and optimizer in the host's memory; a layer's weights come when it runs."""


class RefFsdpConfig(ShardConfig):
    """The reference's: it follows the actor's, so that at the start both give the same log-probs."""

    dtype: Annotated[Dtype, Inherits("actor_rollout_ref.actor.fsdp_config.dtype")]
    """Number format of the reference's forward pass."""


class MixedPrecisionConfig(Section):
    """`*.fsdp_config.mixed_precision`: formats beside that of the forward and backward pass."""

    reduce_dtype: Annotated[Reduce, IN_SHARDS] = "float32"
    """Number format in which gradients are summed over devices."""


class TrainedFsdpConfig(ShardConfig):
    """`*.fsdp_config` of a model that is trained."""

    optimizer_offload: Annotated[bool, IN_SHARDS] = False
    """Keep the optimizer's state in the host's memory between updates."""
    mixed_precision: MixedPrecisionConfig


Replay = Literal["disabled", "R2", "R3"]


class RouterReplayConfig(Section):
    """`actor.router_replay`: experts of a mixture that the update is to choose as an earlier pass did."""

    mode: Replay = "disabled"
    """R2: the update sends tokens to the experts that the old log-probs were computed with; R3: to the sampler's."""


class MegatronReplayConfig(Section):
    """`actor.megatron.router_replay`: the same for Megatron."""

    mode: Annotated[Replay, Inherits("actor_rollout_ref.actor.router_replay.mode")]
    """R2: the update sends tokens to the experts that the old log-probs were computed with; R3: to the sampler's."""


class MegatronConfig(Section):
    """`actor.megatron`: how several devices share the model, and what of Megatron's own config is changed."""

    tensor_model_parallel_size: Positive = 1
    """Devices that share each layer's matrices; best within one machine."""
    pipeline_model_parallel_size: Positive = 1
    """Devices that have some layers each, one after the other."""
    virtual_pipeline_model_parallel_size: Positive | None = None
    """Pieces of the model on each device of a pipeline, which take turns with those of the others: less idle time."""
    context_parallel_size: Positive = 1
    """Devices that share each sequence."""
    expert_model_parallel_size: Positive = 1
    """Devices among which the experts of a layer are dealt."""
    expert_tensor_parallel_size: Positive | None = None
    """Devices that share each expert's matrices; null: as tensor_model_parallel_size."""
    sequence_parallel: bool = True
    """Tensor-parallel devices hold a part of the tokens each where they share no matrix: less memory."""
    override_transformer_config: Options
    """Fields of Megatron's TransformerConfig to change, such as num_layers_in_first_pipeline_stage."""
    param_offload: bool = False
    """Keep the weights in the host's memory while the model does not run."""
    grad_offload: bool = False
    """Give the memory of the gradients back between updates."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in the host's memory between updates."""
    use_distributed_optimizer: bool = True
    """Data-parallel devices keep a part of the optimizer's state each."""
    router_replay: MegatronReplayConfig
    use_dist_checkpointing: bool = False
    """Read the weights at the start from dist_checkpointing_path; config and tokenizer still come from model.path."""
    dist_checkpointing_path: Annotated[str | None, FROM_MEGATRON] = None
    """Directory that Megatron's dist_checkpointing wrote in the format torch_dist."""
    dist_checkpointing_prefix: Annotated[str, FROM_MEGATRON] = ""
    """Before the names of all tensors there."""


def _actors(name: str) -> Inherits:
    return Inherits(f"actor_rollout_ref.actor.megatron.{name}")


class RefMegatronConfig(Section):
    """`ref.megatron`: as the actor's, whose devices the reference shares."""

    tensor_model_parallel_size: Annotated[Positive, _actors("tensor_model_parallel_size")]
    """Devices that share each layer's matrices."""
    pipeline_model_parallel_size: Annotated[Positive, _actors("pipeline_model_parallel_size")]
    """Devices that have some layers each."""
    virtual_pipeline_model_parallel_size: Annotated[Positive | None, _actors("virtual_pipeline_model_parallel_size")]
    """Pieces of the model on each device of a pipeline."""
    context_parallel_size: Annotated[Positive, _actors("context_parallel_size")]
    """Devices that share each sequence."""
    expert_model_parallel_size: Annotated[Positive, _actors("expert_model_parallel_size")]
    """Devices among which the experts of a layer are dealt."""
    expert_tensor_parallel_size: Annotated[Positive | None, _actors("expert_tensor_parallel_size")]
    """Devices that share each expert's matrices."""
    sequence_parallel: Annotated[bool, _actors("sequence_parallel")]
    """Tensor-parallel devices hold a part of the tokens each where they share no matrix."""
    override_transformer_config: Annotated[
        dict[str, object], Says("a {key: value} mapping"), _actors("override_transformer_config")
    ]
    """Fields of Megatron's TransformerConfig to change."""
    param_offload: Annotated[bool, _actors("param_offload")]
    """Keep the weights in the host's memory while the model does not run."""
    use_dist_checkpointing: Annotated[bool, _actors("use_dist_checkpointing")]
    """Read the weights from dist_checkpointing_path."""
    dist_checkpointing_path: Annotated[str | None, FROM_MEGATRON, _actors("dist_checkpointing_path")]
    """Directory that Megatron's dist_checkpointing wrote in the format torch_dist."""
    dist_checkpointing_prefix: Annotated[str, FROM_MEGATRON, _actors("dist_checkpointing_prefix")]
    """Before the names of all tensors there."""


class CriticMegatronConfig(RefMegatronConfig):
    """`critic.megatron`: as the actor's, whose devices the critic shares."""

    grad_offload: Annotated[bool, _actors("grad_offload")]
    """Give the memory of the gradients back between updates."""
    optimizer_offload: Annotated[bool, _actors("optimizer_offload")]
    """Keep the optimizer's state in the host's memory between updates."""
    use_distributed_optimizer: Annotated[bool, _actors("use_distributed_optimizer")]
    """Data-parallel devices keep a part of the optimizer's state each."""
    use_dist_checkpointing: bool = False
    """Read the weights at the start from dist_checkpointing_path; config and tokenizer still come from model.path."""
    dist_checkpointing_path: Annotated[str | None, FROM_MEGATRON] = None
    """Directory that Megatron's dist_checkpointing wrote in the format torch_dist."""
    dist_checkpointing_prefix: Annotated[str, FROM_MEGATRON] = ""
    """Before the names of all tensors there."""
