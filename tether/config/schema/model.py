"""`actor_rollout_ref.model` and `critic.model`: which weights, and how they are held."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tether.config.schema.engine import FsdpConfig, TiledMlpConfig
from tether.config.schema.section import AliasOf, Count, Inherits, Options, Positive, Section, Strings


class FusedKernelConfig(Section):
    """`model.fused_kernel_options`: which fused kernels."""

    impl_backend: str = "torch"
    """torch or triton."""


class ModelConfig(Section):
    """The policy's backbone; the reference is its frozen copy."""

    path: str = Field(examples=["Qwen/Qwen2.5-0.5B-Instruct"])
    """Model: a directory in Hugging Face layout, a GGUF file, a hub id, or a known name; embodied: a checkpoint."""
    tokenizer_path: Annotated[str, Inherits(".path")]
    """Where the tokenizer comes from."""
    trust_remote_code: bool = False
    """Let the model's repository run its own code."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, more time, same gradients."""
    use_remove_padding: bool = True
    """Pack rows without padding into one long sequence: faster, same gradients."""
    lora_rank: Count = 0
    """Rank of LoRA adapters; 0 trains all weights. The reference is then the model without its adapter."""
    lora_alpha: Positive = 16
    """Scale of LoRA: the adapter's output is multiplied by lora_alpha / lora_rank."""
    target_modules: Strings = ("all-linear",)
    """Modules that get an adapter."""
    exclude_modules: Strings | None = None
    """Modules that get no adapter."""
    lora_adapter_path: str | None = None
    """Adapter to start from."""
    custom_chat_template: Annotated[str | None, AliasOf("data.chat_template")] = None
    """verl's name of data.chat_template."""
    override_config: Options
    """Fields of the model's own config.json to change."""
    hf_config_path: str | None = None
    """Where the model's config comes from, if not from path."""
    external_lib: str | None = None
    """Module to import before the model."""
    use_shm: bool = False
    """Copy weights to shared memory first."""
    enable_activation_offload: bool = False
    """Keep activations on the CPU."""
    use_liger: bool = False
    """Liger's fused kernels."""
    use_fused_kernels: bool = False
    """Fused log-prob and entropy."""
    fused_kernel_options: FusedKernelConfig
    tiled_mlp: TiledMlpConfig


class CriticModelConfig(Section):
    """The critic's backbone; a scalar head stands on it."""

    path: Annotated[str, Inherits("actor_rollout_ref.model.path")]
    """Model whose backbone the critic starts from."""
    tokenizer_path: Annotated[str, Inherits("actor_rollout_ref.model.path")]
    """Where the critic's tokenizer comes from."""
    trust_remote_code: Annotated[bool, Inherits("actor_rollout_ref.model.trust_remote_code")]
    """Let the model's repository run its own code."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, more time, same gradients."""
    use_remove_padding: bool = False
    """Pack rows without padding into one long sequence: faster, same gradients."""
    fsdp_config: FsdpConfig
    lora_rank: Count = 0
    """Rank of the critic's LoRA adapters; 0 trains all weights."""
    lora_alpha: Positive = 16
    """Scale of the critic's LoRA."""
    target_modules: Strings = ("all-linear",)
    """Modules that get an adapter."""
    override_config: Options
    """Fields of the model's own config.json to change."""
    external_lib: Annotated[str | None, Inherits("actor_rollout_ref.model.external_lib")]
    """Module to import before the model."""
    use_shm: bool = False
    """Copy weights to shared memory first."""
    enable_activation_offload: bool = False
    """Keep activations on the CPU."""
    tiled_mlp: TiledMlpConfig
