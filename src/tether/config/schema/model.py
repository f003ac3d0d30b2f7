"""`actor_rollout_ref.model` and `critic.model`: the weights, and how they are trained."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tether.config.schema.engine import TrainedFsdpConfig
from tether.config.schema.section import (
    EMBODIED_TOO,
    ActsIf,
    AliasOf,
    Count,
    Inherits,
    NullIsUnset,
    Options,
    Section,
    Strings,
)


class LoraConfig(Section):
    """`model.lora`: how adapters are sent to servers."""

    merge: bool = False
    """True: vLLM gets merged weights; False: base weights once, then adapters. SGLang always gets merged weights."""


LORA = ActsIf(".lora_rank", off=(0,))
FRESH = ActsIf(".lora_rank", off=(0,), also=ActsIf(".lora_adapter_path", on=(None,)))
LORA_AT_VLLM = ActsIf(
    "actor_rollout_ref.model.lora_rank", off=(0,), also=ActsIf("actor_rollout_ref.rollout.name", on=("vllm",))
)


class BackboneConfig(Section):
    """A trainable backbone: its weights and its LoRA adapters."""

    path: str
    """Model: a Hugging Face folder, a GGUF file, a hub id, or a known name."""
    trust_remote_code: bool = False
    """Allow code from the model's repository to run."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, more time, same gradients."""
    use_remove_padding: bool = True
    """Pack rows without padding into one long sequence: faster, same gradients."""
    lora_rank: Count = 0
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: Annotated[Count, LORA] = 16
    """Scale of LoRA: the adapter's output is multiplied by lora_alpha / lora_rank."""
    target_modules: Annotated[Strings, FRESH] = ("all-linear",)
    """Linear layers with an adapter: names, a pattern of full names, or all-linear (all except head and experts)."""
    exclude_modules: Annotated[Strings, NullIsUnset(), FRESH] = ()
    """Linear layers excluded from target_modules: names, or a regular expression of full names."""
    lora_adapter_path: str | None = None
    """Folder of the LoRA adapter to start from, with its rank, scale and layers; null: a new one."""
    override_config: Options
    """Fields of the model's config.json to override."""


class ModelConfig(BackboneConfig):
    """The policy's backbone; the reference is its frozen copy."""

    path: Annotated[str, EMBODIED_TOO] = Field(examples=["Qwen/Qwen2.5-0.5B-Instruct"])
    """Model: a Hugging Face folder, a GGUF file, a hub id, or a known name; embodied: a checkpoint, or null."""
    lora_rank: Annotated[Count, EMBODIED_TOO] = 0
    """Rank of LoRA adapters; 0 trains all weights. The reference is then the model without its adapter."""
    lora_alpha: Annotated[Count, LORA, EMBODIED_TOO] = 16
    target_modules: Annotated[Strings, FRESH, EMBODIED_TOO] = ("all-linear",)
    lora: Annotated[LoraConfig, LORA_AT_VLLM]
    tokenizer_path: Annotated[str, Inherits(".path")]
    """Folder or hub id of the tokenizer."""
    custom_chat_template: Annotated[str | None, AliasOf("data.chat_template")] = None
    """verl's name for data.chat_template."""


class CriticModelConfig(BackboneConfig):
    """The critic's backbone, with a scalar head on top."""

    path: Annotated[str, Inherits("actor_rollout_ref.model.path")]
    """Model whose backbone initialises the critic."""
    trust_remote_code: Annotated[bool, Inherits("actor_rollout_ref.model.trust_remote_code")]
    use_remove_padding: bool = False
    lora_rank: Count = 0
    """Rank of LoRA adapters; 0 trains all weights. The scalar head is always fully trained."""
    fsdp_config: TrainedFsdpConfig
