"""Fused operations for the models: one interface, implemented in PyTorch (the reference), compiled for CPUs, or for
CUDA.

`kernels_for` chooses a backend for a tensor's device and dtype; the reference defines what each operation returns.
"""

from tether.kernels.causal_attention import AttentionLayout, AttentionSpec, masked_attention, select_rows, visible_keys
from tether.kernels.dispatch import backend, kernels_for
from tether.kernels.reference import (
    FEW_ROWS,
    Epilogue,
    PackedLinears,
    RecordedKernels,
    Reference,
    inverse_sample,
    rows_in_scratch,
)
from tether.kernels.vocabulary_chunks import (
    KeptTokenSets,
    LogitTransform,
    VocabularyChunks,
    default_chunk_size,
    matmul_dtype,
)

__all__ = [
    "FEW_ROWS",
    "AttentionLayout",
    "AttentionSpec",
    "Epilogue",
    "KeptTokenSets",
    "LogitTransform",
    "PackedLinears",
    "RecordedKernels",
    "Reference",
    "VocabularyChunks",
    "backend",
    "default_chunk_size",
    "inverse_sample",
    "kernels_for",
    "masked_attention",
    "matmul_dtype",
    "rows_in_scratch",
    "select_rows",
    "visible_keys",
]
