"""Modules that replace those of transformers: packed attention, RMS norm, rotary embedding, gated MLP.

They call `tether.kernels` and compute the same as the modules that they replace.
"""

from tether.text.models.layers.attention import Packed, Padded, use_tether_attention
from tether.text.models.layers.fused_modules import RMSNorm
from tether.text.models.layers.positions import context_length
from tether.text.models.layers.rotary_attention import rotated, spec_of
from tether.text.models.layers.ulysses import SequenceRanks, Shared, copies_of_keys

__all__ = [
    "Packed",
    "Padded",
    "RMSNorm",
    "SequenceRanks",
    "Shared",
    "context_length",
    "copies_of_keys",
    "rotated",
    "spec_of",
    "use_tether_attention",
]
