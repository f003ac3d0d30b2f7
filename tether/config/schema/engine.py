"""Number formats, in the section that actor, reference and critic share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from tether.config.schema.section import Inherits, Section

SHORT = {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16"}
"""Short names of number formats."""


def _spelled_out(value: object) -> object:
    return SHORT.get(value.removeprefix("torch."), value.removeprefix("torch.")) if isinstance(value, str) else value


Dtype = Annotated[Literal["auto", "bfloat16", "float32"], BeforeValidator(_spelled_out)]


class FsdpConfig(Section):
    """`*.fsdp_config`: the number format."""

    dtype: Dtype = "auto"
    """Number format of the forward and backward pass; auto: bfloat16 where the device computes in it, else float32."""


class RefFsdpConfig(FsdpConfig):
    """The reference's: it follows the actor's, so that at the start both give the same log-probs."""

    dtype: Annotated[Dtype, Inherits("actor_rollout_ref.actor.fsdp_config.dtype")]
    """Number format of the reference's forward pass."""
