"""Number formats and shards, in the section that actor, reference and critic share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from tether.config.schema.section import ActsIf, Inherits, Says, Section

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
ON_RANKS = ActsIf("trainer.n_gpus_per_node", off=(1,), other=ActsIf("trainer.nnodes", off=(1,)))
"""Acts where several devices train."""


class FsdpConfig(Section):
    """`*.fsdp_config`: the number format."""

    dtype: Dtype = "auto"
    """Number format of the forward and backward pass; auto: bfloat16 where the device computes in it, else float32."""


class ShardConfig(FsdpConfig):
    """`*.fsdp_config`: the number format, and how several devices share the model."""

    fsdp_size: Annotated[Shards, ON_RANKS] = -1
    """Devices among which the weights are cut; fewer than there are: so many copies of the model; -1: all devices."""
    reshard_after_forward: Annotated[bool, ON_RANKS] = True
    """Gather a layer's weights again for the backward pass: less memory, more to send."""
    param_offload: Annotated[bool, ON_RANKS] = False
    """Keep the weights in the host's memory while the model does not run."""
    offload_policy: Annotated[bool, ON_RANKS] = False
    """Keep weights, gradients and optimizer in the host's memory; a layer's weights come when it runs."""


class RefFsdpConfig(ShardConfig):
    """The reference's: it follows the actor's, so that at the start both give the same log-probs."""

    dtype: Annotated[Dtype, Inherits("actor_rollout_ref.actor.fsdp_config.dtype")]
    """Number format of the reference's forward pass."""


class MixedPrecisionConfig(Section):
    """`*.fsdp_config.mixed_precision`: formats beside that of the forward and backward pass."""

    reduce_dtype: Annotated[Reduce, ON_RANKS] = "float32"
    """Number format in which gradients are summed over devices."""


class TrainedFsdpConfig(ShardConfig):
    """That of a model that is trained."""

    optimizer_offload: Annotated[bool, ON_RANKS] = False
    """Keep the optimizer's state in the host's memory between updates."""
    mixed_precision: MixedPrecisionConfig
