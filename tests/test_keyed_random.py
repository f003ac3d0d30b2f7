"""The published hash, and numbers that look independent along every part of their address."""

import pytest
import torch

from tether.keyed_random import _mix, uniform

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
