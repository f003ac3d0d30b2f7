"""Causal language models and critics of transformers: loading, LoRA, gradient checkpointing, the packing check.

`model_path` and `registry_download` find and download weights without importing torch, so import the module that you
need.
"""

__all__ = [
    "critic",
    "empty",
    "expert_choice",
    "fused_experts",
    "gradient_checkpointing",
    "lazy_weights",
    "load",
    "lora",
    "model_path",
    "packing_check",
    "registry_download",
    "save",
]
