"""Causal language models and critics of transformers: loading, LoRA, gradient checkpointing, the packing check.

`model_path` locates weights without importing torch, so this package imports none of its modules.
"""
