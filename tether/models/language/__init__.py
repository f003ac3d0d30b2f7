"""Causal language models and critics of transformers: loading, LoRA, gradient checkpointing, the packing check."""
