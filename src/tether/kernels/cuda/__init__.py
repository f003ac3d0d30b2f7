"""Kernels for CUDA from optional packages: Liger and flash-attn.

`backend` chooses between them and PyTorch's own, and logs which one it uses.
"""

__all__ = ["backend"]
