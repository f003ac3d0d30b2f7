"""Kernels by AMX and by AVX-512 against the formulas in float64, and against the kernels that need neither."""

import ctypes
import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tests.kernels.test_elementwise import close, drawn
from tests.pairwise import in_turn_parameters, pairwise_parameters
from tether.kernels.cpu import (
    amx_instructions,
    avx512_instructions,
    decode_attention,
    linear_amx,
    linear_avx512,
    linear_plain,
)
from tether.kernels.dispatch import kernels_for
from tether.kernels.precompile import compile_kernels

BF16 = torch.bfloat16
HERE = {linear_amx: amx_instructions.has_amx(), linear_avx512: avx512_instructions.has_avx512_bf16()}
both = pytest.mark.parametrize(
    "module",
    [
        pytest.param(linear_amx, id="amx", marks=pytest.mark.skipif(not HERE[linear_amx], reason="no AMX here")),
        pytest.param(
            linear_avx512,
            id="avx512",
            marks=pytest.mark.skipif(not HERE[linear_avx512], reason="no AVX512_BF16 here"),
        ),
    ],
)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """These alone: where the instructions are replaced, no other kernel is needed."""
    compile_kernels([decode_attention, *(module for module in HERE if HERE[module])])


def test_amx_comes_first() -> None:
    expected = next((module for module in (linear_amx, linear_avx512) if HERE[module]), None)
    assert kernels_for(torch.zeros(1, dtype=BF16)).linear_kernels is expected


@both
@pytest.mark.parametrize(("rows", "sizes"), in_turn_parameters((1, 16, 17, 33, 300), ((1, 32), (50, 96), (65, 64))))
def test_products(module, rows: int, sizes: tuple[int, int]) -> None:
    outputs, width = sizes
    x, weight = drawn(rows, width), drawn(outputs, width, seed=1)
    bias, other = drawn(outputs, seed=2), drawn(rows, outputs, seed=3)
    plain = x.double() @ weight.double().T
    biased = plain + bias.double()
    cases = (
        (linear_plain.PLAIN, None, None, plain),
        (linear_plain.PLAIN, bias, None, biased),
        (linear_plain.SILU, bias, None, torch.nn.functional.silu(biased)),
        (linear_plain.TIMES, None, other, plain * other.double()),
        (linear_plain.PLUS, bias, other, biased + other.double()),
    )
    packed = module.packed(weight)
    for what, summand, beside, expected in cases:
        close(module.linear(x, packed, outputs, summand, what, beside), expected)


@both
def test_a_row_does_not_depend_on_those_beside_it(module) -> None:
    x, packed = drawn(70, 64), module.packed(drawn(40, 64, seed=1))
    together = module.linear(x, packed, 40, None, linear_plain.PLAIN, None)
    for row in (0, 15, 16, 40, 69):
        assert module.linear(x[row:], packed, 40, None, linear_plain.PLAIN, None)[0].equal(together[row])


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_damage_is_not_hidden(module, bad: float) -> None:
    x = drawn(20, 32)
    x[3, 7] = bad
    out = module.linear(x, module.packed(drawn(5, 32, seed=1)), 5, None, linear_plain.PLAIN, None)
    assert not out[3].isfinite().any()
    assert out[torch.arange(20) != 3].isfinite().all()


def attended(
    module,
    heads: Tensor,
    groups: int,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """`heads` [R, 2 G + 2 + 2, D]: query heads, two of keys, two of values, as a layer's product lays them out."""
    query, key, value = heads.split([2 * groups, 2, 2], dim=1)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    new, cache = {"query": query, "key": key, "value": value}, {"keys": keys, "values": values}
    module.attend(**new, **cache, position=position, out=out, scale=0.1, softcap=softcap, window=window)
    return out


@both
@pytest.mark.parametrize(
    ("softcap", "window", "heads_and_size"),
    pairwise_parameters((0.0, 2.0), (0, 1, 40), ((1, 64), (3, 64), (2, 128), (16, 64))),
)
def test_attention_of_a_new_token(module, softcap: float, window: int, heads_and_size: tuple[int, int]) -> None:
    groups, size = heads_and_size
    position = torch.tensor([0, 3, 31, 32, 62, 95])
    assert module.can_attend(groups, size, size)
    keys, values = drawn(6, 2, 96, size, seed=1), drawn(6, 2, 96, size, seed=2)
    heads = drawn(6, 2 * groups + 4, size)
    unwritten = (torch.arange(96) >= position[:, None])[:, None].expand(6, 2, 96)
    keys[unwritten] = values[unwritten] = math.nan
    theirs = (keys.clone(), values.clone())
    found = attended(module, heads, groups, position, keys, values, softcap, window)
    expected = attended(decode_attention, heads, groups, position, *theirs, softcap, window)
    close(found, expected.double(), 4)  # weights are rounded too
    assert found.isfinite().all()
    for mine, other in zip((keys, values), theirs, strict=True):  # the new token is in the cache
        assert mine.nan_to_num().equal(other.nan_to_num())


@both
def test_a_key_that_is_not_a_number_spoils_its_row(module) -> None:
    heads, keys, values = drawn(2, 8, 64), drawn(2, 2, 32, 64, seed=1), drawn(2, 2, 32, 64, seed=2)
    keys[1, 0, 3, 0] = math.nan
    out = attended(module, heads, 2, torch.tensor([5, 5]), keys, values)
    assert out[1, :2].isnan().all()
    assert out[0].isfinite().all()


def test_what_cannot_be_done_is_known() -> None:
    for module in (linear_amx, linear_avx512):
        assert not module.can_multiply(48)
        assert not module.can_attend(1, 48, 64)
        assert not module.can_attend(1, 64, 80)
    assert not linear_amx.can_attend(17, 64, 64)
    assert not linear_amx.can_attend(1, 32, 64)
    assert linear_avx512.can_attend(17, 32, 96)


@both
def test_the_number_of_threads_changes_no_bit(module) -> None:
    position, before, results = torch.tensor([9, 1, 30, 4, 4, 17, 0]), torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        out = module.linear(drawn(40, 64), module.packed(drawn(99, 64, seed=1)), 99, None, linear_plain.SILU, None)
        keys, values = drawn(7, 2, 32, 64, seed=1), drawn(7, 2, 32, 64, seed=2)
        results.append((out, attended(module, drawn(7, 8, 64), 2, position, keys, values)))
    torch.set_num_threads(before)
    assert all(found.equal(first) for other in results[1:] for found, first in zip(other, results[0], strict=True))


@both
def test_memory_that_is_given_back_is_not_used(module) -> None:
    """glibc fills memory with a pattern when it is given back."""
    glibc, perturb = ctypes.CDLL(None), -6  # M_PERTURB of malloc.h
    assert glibc.mallopt(perturb, 165)
    try:
        test_products(module, 33, (65, 64))
        test_attention_of_a_new_token(module, 0.0, 0, (3, 64))
    finally:
        glibc.mallopt(perturb, 0)


def run_in_software(*arguments: str) -> None:
    """Tests of what is written for AMX and AVX-512, their instructions alone replaced, and freed memory overwritten."""
    plugin = ["-p", "tests.kernels.software_instructions", "-p", "no:cacheprovider", "-rs", "--timeout", "3000"]
    command = [sys.executable, "-m", "pytest", *plugin, *arguments]
    environment = {**os.environ, "MALLOC_PERTURB_": "165"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "SKIPPED" not in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(all(HERE.values()), reason="AMX and AVX512_BF16 themselves are here")
def test_amx_and_avx512_in_software() -> None:
    here = " and not avx512" if HERE[linear_avx512] else ""  # whose instructions have run the same tests
    run_in_software("-k", f"not software{here}", __file__)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(HERE[linear_avx512], reason="AVX512_BF16 itself is here")
def test_packed_attention_in_software() -> None:
    run_in_software(__file__.replace("linear", "packed_attention"))
