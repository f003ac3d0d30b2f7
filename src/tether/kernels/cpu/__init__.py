"""bfloat16 kernels for x86 processors with AVX-512 or AMX, compiled with numba.

`backend` is the only module that others import, and only where the processor has these instructions.
"""

__all__ = ["backend"]
