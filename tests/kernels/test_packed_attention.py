"""Attention over packed segments in kernels, against the formulas in float64. Runs where there is AVX512_BF16."""

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.test_elementwise import drawn
from tests.pairwise import pairwise_parameters
from tether.kernels.causal_attention import AttentionSpec, masked_attention, visible_keys
from tether.kernels.dispatch import REFERENCE, kernels_for

BF16 = torch.bfloat16
if kernels_for(torch.zeros(1, dtype=BF16)) is REFERENCE:
    pytest.skip("no GNU OpenMP here", allow_module_level=True)

from tether.kernels.cpu import avx512_instructions, packed_attention  # noqa: E402

has_avx512 = avx512_instructions.has_avx512_bf16()
pytestmark = [
    pytest.mark.skipif(not has_avx512, reason="no AVX512_BF16 here"),
    pytest.mark.usefixtures("compiled_kernels"),
]

LAYOUTS = {
    "one": ((40,), None),
    "apart": ((7, 33, 64, 1, 100), None),
    "shared": ((50, 20, 33, 70, 5), (None, 0, 0, None, 3)),
    "whole blocks": ((32, 32, 64), (None, 0, 0)),
}
HEADS = {"grouped": (6, 2, 64, 64), "plain": (2, 2, 32, 32), "sizes": (4, 1, 32, 96)}
"""Query heads, key heads, their size, size of values."""


def inputs(tokens: int, heads: str) -> list[Tensor]:
    """Query, key, value as views of what a layer's product gives, and a gradient of what comes out."""
    of_query, of_key, size, value_size = HEADS[heads]
    both = drawn(tokens, of_query + of_key, size)
    views = (both[:, :of_query], both[:, of_query:], drawn(tokens, of_key, value_size, seed=1))
    return [*(x.detach().requires_grad_() for x in views), drawn(tokens, of_query, value_size, seed=2)]


def visible(lengths: tuple, prefixes: tuple | None, spec: AttentionSpec) -> Tensor:
    """[N, N]: which token sees which."""
    prefixes = prefixes or (None,) * len(lengths)
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    begins = torch.tensor([0 if prefix is None else lengths[prefix] for prefix in prefixes])
    position = torch.cat([torch.arange(n) for n in lengths]) + begins[segment]
    continues = torch.tensor([-1 if prefix is None else prefix for prefix in prefixes])[segment]
    related = (segment[:, None] == segment) | (continues[:, None] == segment)
    return related & visible_keys(position, position, spec)


def results(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, out: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad)]


@pytest.mark.parametrize(
    ("layout", "heads", "window", "softcap"),
    pairwise_parameters(list(LAYOUTS), list(HEADS), (None, 2, 20, 64), (None, 2.0)),
)
def test_values_and_gradients(layout: str, heads: str, window: int | None, softcap: float | None) -> None:
    lengths, prefixes = LAYOUTS[layout]
    spec = AttentionSpec(0, 0.3, window, softcap)
    query, key, value, grad = inputs(sum(lengths), heads)
    assert packed_attention.can_attend(query.shape[2], value.shape[2])
    found = results(query, key, value, grad, packed_attention.attention(query, key, value, lengths, prefixes, spec))
    exact = [x.detach().double().transpose(0, 1)[None].requires_grad_() for x in (query, key, value)]
    out = masked_attention(*exact, visible(lengths, prefixes, spec), spec)
    expected = results(*exact, grad.double().transpose(0, 1)[None], out)
    for ours, theirs in zip(found, expected, strict=True):
        theirs = theirs[0].transpose(0, 1)
        assert ours.dtype == BF16
        assert (ours.double() - theirs).norm() <= 4e-3 * theirs.norm()


def test_a_segment_does_not_depend_on_the_others_nor_on_the_threads() -> None:
    spec, lengths = AttentionSpec(0, 0.3), (70, 33, 20)
    query, key, value, grad = inputs(sum(lengths), "grouped")
    together = results(
        query, key, value, grad, packed_attention.attention(query, key, value, lengths, (None, None, 1), spec)
    )
    alone = [x.detach()[70:].requires_grad_() for x in (query, key, value)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 3)
    try:
        out = packed_attention.attention(*alone, lengths[1:], (None, 0), spec)
        for whole, part in zip(together, results(*alone, grad[70:], out), strict=True):
            assert part.equal(whole[70:])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_damage_stays_in_its_sequence_and_is_not_hidden(bad: float) -> None:
    lengths = (40, 40)
    query, key, value, _ = inputs(80, "plain")
    with torch.no_grad():
        value[45, 0, 3] = bad
        out = packed_attention.attention(query, key, value, lengths, None, AttentionSpec(0, 0.3))
    assert out[:40].isfinite().all()
    assert not out[45:, 0, 3].isfinite().any()


def test_other_sizes_are_left_to_others() -> None:
    assert not packed_attention.can_attend(40, 64)
    assert not packed_attention.can_attend(64, 8)
