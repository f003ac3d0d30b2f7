"""bfloat16 kernels for x86 processors with AVX-512 or AMX, compiled with numba."""
