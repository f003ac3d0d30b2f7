"""Kernels for CUDA from packages that a user may have installed: Liger and flash-attn.

`maker` chooses between them and PyTorch's own, and says in the log which one it took.
"""

__all__ = ["maker"]
