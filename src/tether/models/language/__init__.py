"""Causal language models and critics of transformers: loading, LoRA, gradient checkpointing, the packing check.

`model_path` and `registry_download` find and fetch weights without loading torch: import the module that you need.
"""

__all__ = [
    "critic",
    "empty",
    "expert_choice",
    "fused_experts",
    "gradient_checkpointing",
    "load",
    "lora",
    "model_path",
    "packing_check",
    "registry_download",
    "save",
    "unread",
]
