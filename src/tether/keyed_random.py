"""Random numbers that are computed from an address instead of drawn from a generator.

Every number is a hash of (seed, step, purpose, index). There is no generator state, so earlier draws do not affect
later ones, a token gets the same number in any batch, slot or process, and nothing has to be saved to resume.

The hash is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)
applied once for each element of the address. int64 arithmetic wraps around, which is the arithmetic modulo 2**64 that
it needs.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Words = TypeVar("Words", int, "Tensor", NDArray[np.int64])


def _signed(word: int) -> int:
    """Convert an unsigned 64-bit word to the int64 with the same bits."""
    word %= 1 << 64
    return word - (1 << 64) if word >> 63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: keeps an all-zero address from hashing to zero
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def uniform(seed: int, step: int, sample: Tensor, token: Tensor) -> Tensor:
    """Return a number in [0, 1) for each (sample, token): multiples of 2**-53, or of 2**-24 on MPS, which has no
    float64.

    Args:
        seed: seed of the run; any integer, reduced modulo 2**64.
        step: training step.
        sample: [R] int64, index of the response within the step.
        token: [R] int64, index of the token within the response.
    """
    word = _hash(_hash(_hash(_hash(sample ^ sample, seed), step), sample), token)
    if word.device.type == "mps":
        return _shift_right(word, 40).float() * 2.0**-24
    return _shift_right(word, 11).double() * 2.0**-53


def generator(seed: int, step: int, purpose: str, *index: int) -> torch.Generator:
    """Return a generator on the CPU for one purpose in one training step.

    Args:
        seed: seed of the run; any integer, reduced modulo 2**64.
        step: training step, epoch, or another counter of draws of this purpose.
        purpose: name of the use; different names give different numbers.
        index: further indices of the draw, such as that of a mini-batch.
    """
    import torch  # imported here, because environment processes use `seed_of` and do not load torch

    return torch.Generator().manual_seed(_addressed(seed, step, purpose, *index))


def seed_of(seed: int, step: int, purpose: str, *index: int) -> int:
    """Return a seed below 2**31, which every simulator accepts; arguments as for `generator`."""
    return _addressed(seed, step, purpose, *index) % 2**31


def permutation(size: int, seed: int, step: int, purpose: str, *index: int) -> NDArray[np.int64]:
    """Return ``range(size)`` in a random order, the same on every machine; arguments as for `generator`."""
    words = _hash(np.full(size, _addressed(seed, step, purpose, *index)), np.arange(size))
    return np.argsort(words, kind="stable")


def held_out_rows(count: int, share: float, seed: int) -> list[int]:
    """Return the indices of the held-out rows among `count` (at least 2): a fraction of them, at least one and not
    all."""
    size = min(max(round(share * count), 1), count - 1)
    return permutation(count, seed, 0, "held out")[:size].tolist()


def _addressed(seed: int, step: int, purpose: str, *index: int) -> int:
    """Return the hash of an address that includes a purpose, in 64 bits that no sample index can produce.

    It uses Python's integers, which are faster for a single word and agree in the low 64 bits.
    """
    word = 0
    digest = hashlib.blake2b(purpose.encode(), digest_size=8).digest()
    for element in (seed, step, int.from_bytes(digest), *index):
        word = _signed(_hash(word, element))
    return word


def _hash(word: Words, element: int | Words) -> Words:
    """Extend the hash of an address by its next element."""
    return _mix((word ^ (_signed(element) if isinstance(element, int) else element)) + _GAMMA)


def _mix(word: Words) -> Words:
    word = (word ^ _shift_right(word, 30)) * _FIRST
    word = (word ^ _shift_right(word, 27)) * _SECOND
    return word ^ _shift_right(word, 31)


def _shift_right(word: Words, bits: int) -> Words:
    """Shift right and fill with zeros; int64's own shift would copy the sign bit."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
