"""Random numbers that are addressed, not drawn in order.

The uniform for a token is a hash of (seed, step, sample, token). No generator state exists, so a token gets the same
number whatever batch, slot or process it is sampled in, and nothing has to be saved to resume.

The hash is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)
applied once for each part of the address. int64 arithmetic wraps, which is the arithmetic modulo 2**64 that it needs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    word %= 1 << 64
    return word - (1 << 64) if word >> 63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: keeps an all-zero address from hashing to zero
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def uniform(seed: int, step: int, sample: Tensor, token: Tensor) -> Tensor:
    """One number in [0, 1) for each (sample, token): multiples of 2**-53, or of 2**-24 on MPS, which has no float64.

    Args:
        seed: of the run; any integer, taken modulo 2**64.
        step: training step.
        sample: [R] int64, number of the response within the step.
        token: [R] int64, number of the token within the response.
    """
    word = torch.zeros_like(sample)
    for part in (_signed(seed), _signed(step), sample, token):
        word = _mix((word ^ part) + _GAMMA)
    if word.device.type == "mps":
        return _shift_right(word, 40).to(torch.float32) * 2.0**-24
    return _shift_right(word, 11).to(torch.float64) * 2.0**-53


def _mix(word: Tensor) -> Tensor:
    word = (word ^ _shift_right(word, 30)) * _FIRST
    word = (word ^ _shift_right(word, 27)) * _SECOND
    return word ^ _shift_right(word, 31)


def _shift_right(word: Tensor, bits: int) -> Tensor:
    """Shift in zeros; int64's own shift would copy the sign."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
