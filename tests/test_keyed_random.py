"""The published hash, and numbers that look independent along every part of their address."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from tether.keyed_random import _mix, generator, held_out_rows, permutation, seed_of, uniform

WORD = 1 << 64
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix_of_integers(word: int) -> int:
    word = (word ^ (word >> 30)) * FIRST % WORD
    word = (word ^ (word >> 27)) * SECOND % WORD
    return word ^ (word >> 31)


def test_the_finalizer_is_splitmix64() -> None:
    # The first two outputs of the generator seeded with 0, as published with it.
    for times, expected in ((1, 0xE220A8397B1DCDAF), (2, 0x6E789E6AA1B965F4)):
        state = times * GAMMA % WORD
        state -= WORD if state >> 63 else 0
        assert int(_mix(torch.tensor(state))) % WORD == expected


@pytest.mark.parametrize("seed", [0, 42, -1, WORD - 1])
def test_tensor_arithmetic_equals_integer_arithmetic(seed: int) -> None:
    sample, token = torch.tensor([0, 3, 1 << 40]), torch.tensor([0, 511, 7])
    expected = []
    for address in zip(sample.tolist(), token.tolist(), strict=True):
        word = 0
        for part in (seed % WORD, 9, *address):
            word = mix_of_integers(((word ^ part) + GAMMA) % WORD)
        expected.append((word >> 11) / 2**53)
    assert uniform(seed, 9, sample, token).tolist() == expected


@pytest.mark.parametrize("part", ["seed", "step", "sample", "token"])
def test_numbers_are_uniform_and_neighbours_unrelated(part: str) -> None:
    count = torch.arange(4096)
    zero = torch.zeros_like(count)
    if part in ("seed", "step"):
        one = torch.zeros(1, dtype=torch.int64)
        numbers = torch.cat([uniform(*((i, 5) if part == "seed" else (5, i)), one, one) for i in range(4096)])
    else:
        numbers = uniform(1, 2, *((count, zero) if part == "sample" else (zero, count)))
    assert ((numbers >= 0) & (numbers < 1)).all()
    chi_square = (torch.histc(numbers, 64, 0, 1) - 64).square().sum() / 64
    assert 30 < chi_square < 110  # 63 degrees of freedom: both ends beyond one in a thousand
    correlation = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
    assert abs(correlation) < 0.06


def word_of(*address: int | str) -> int:
    """The hash of an address, in integers."""
    word = 0
    for part in address:
        if isinstance(part, str):
            part = int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest())
        word = mix_of_integers(((word ^ part % WORD) + GAMMA) % WORD)
    return word


@pytest.mark.parametrize("seed", [0, 42, -1, WORD - 1])
def test_seeds_generators_and_orders_are_of_one_hash(seed: int) -> None:
    word = word_of(seed, 9, "order", 3)
    assert seed_of(seed, 9, "order", 3) == word % 2**31
    expected = torch.Generator().manual_seed(word)
    assert torch.equal(torch.rand(4, generator=generator(seed, 9, "order", 3)), torch.rand(4, generator=expected))
    keys = [word_of(seed, 9, "order", 3, row) for row in range(50)]
    order = sorted(range(50), key=lambda row: keys[row] - WORD * (keys[row] >> 63))
    assert permutation(50, seed, 9, "order", 3).tolist() == order


def test_known_values() -> None:
    """Written down once: other numbers would change every run that resumes, and the same seed on another machine."""
    assert seed_of(1, 2, "start") == 1568420669
    assert permutation(8, 1, 0, "epoch").tolist() == [1, 5, 7, 3, 4, 2, 0, 6]
    assert uniform(1, 2, torch.tensor([3]), torch.tensor([4])).tolist() == [0.8334472949893438]


ADDRESSES = {
    "seed": lambda i: (i, 5, "start"),
    "step": lambda i: (5, i, "start"),
    "purpose": lambda i: (5, 5, f"start {i}"),
    "index": lambda i: (5, 5, "start", i),
}


@pytest.mark.parametrize("part", ADDRESSES)
def test_seeds_of_neighbours_are_unrelated(part: str) -> None:
    seeds = np.array([seed_of(*ADDRESSES[part](i)) for i in range(4096)]) / 2**31
    counts, _ = np.histogram(seeds, 64, (0, 1))
    assert 30 < ((counts - 64) ** 2 / 64).sum() < 110
    assert abs(np.corrcoef(seeds[:-1], seeds[1:])[0, 1]) < 0.06


def test_each_purpose_has_an_order_of_its_own() -> None:
    one, other = permutation(4096, 1, 2, "order"), permutation(4096, 1, 2, "held out")
    assert sorted(one) == sorted(other) == list(range(4096))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.06
    assert permutation(0, 1, 2, "order").tolist() == []


@pytest.mark.parametrize(("share", "size"), [(0.0, 1), (0.25, 2), (0.5, 5), (1.0, 9)])
def test_some_rows_are_held_out_and_not_all(share: float, size: int) -> None:
    rows = held_out_rows(10, share, 3)
    assert len(set(rows)) == size
    assert rows == permutation(10, 3, 0, "held out")[:size].tolist()


def test_seeds_need_no_torch() -> None:
    code = "import sys, tether.keyed_random as k; k.seed_of(1, 2, 'start'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
