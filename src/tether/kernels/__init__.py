"""Fused operations for the models: one interface, implemented in PyTorch (the reference), compiled for CPUs, or for
CUDA.

`kernels_for` chooses a backend for a tensor's device and dtype; the reference defines what each operation returns.
"""

from tether.kernels.attention_spec import AttentionLayout, AttentionSpec
from tether.kernels.causal_attention import masked_attention, visible_keys
from tether.kernels.dispatch import backend, kernels_for
from tether.kernels.linear_layers import FEW_ROWS, Epilogue, PackedLinears
from tether.kernels.padded_batches import select_rows
from tether.kernels.reference import RecordedKernels, Reference
from tether.kernels.sampling import inverse_sample, rows_in_scratch
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
