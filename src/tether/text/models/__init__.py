"""Causal language models and critics of transformers: loading, LoRA, gradient checkpointing, the packing check.

`model_path` finds weights without importing torch, so import the module that you need.
"""
