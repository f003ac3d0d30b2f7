"""Fused operations for the model code: one interface, made by PyTorch (reference), compiled for a CPU, or for CUDA."""

from tether.kernels.attention_spec import AttentionLayout, AttentionSpec
from tether.kernels.dispatch import kernels_for, maker

__all__ = ["AttentionLayout", "AttentionSpec", "kernels_for", "maker"]
