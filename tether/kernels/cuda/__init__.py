"""Kernels for CUDA from packages that a user may have installed: Liger and flash-attn."""
