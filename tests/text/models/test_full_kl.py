"""The KL over the vocabulary: against the plain formula, for every chunking, and without [tokens, vocabulary]."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.models.test_log_probs import HEADS, LargestTensor, make_head
from tether.algorithms import forward_kl_topk, full_kl
from tether.text.models.full_kl import TopK, forward_kl_of_hidden, full_kl_of_hidden
from tether.text.models.output import LmHead, logits_of


def column(*probabilities: float) -> LmHead:
    """A head that gives a hidden state of 1 these probabilities."""
    return LmHead(torch.tensor([[math.log(p)] for p in probabilities], dtype=torch.float64))


def plain(hidden, head, ref_hidden, ref_head, temperature=1.0):
    return full_kl(logits_of(hidden, head) / temperature, logits_of(ref_hidden, ref_head) / temperature)


def leaves_of(hidden, head):
    return [hidden, head.weight, *([head.bias] if head.bias is not None else [])]


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_numbers_worked_by_hand(chunk_size):
    one = torch.ones(1, 1, dtype=torch.float64)
    found = full_kl_of_hidden(one, column(0.5, 0.25, 0.25), one, column(0.25, 0.5, 0.25), chunk_size=chunk_size)
    assert found.item() == pytest.approx(0.25 * math.log(2), rel=1e-14)  # (1/2) log 2 - (1/4) log 2


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk_size", [1, 5, 11, 100])
def test_values_and_gradients_equal_the_plain_formula(kind, chunk_size):
    torch.manual_seed(0)
    head, ref_head = make_head(11, 4, **HEADS[kind]), make_head(11, 3, bias=True, scale=0.5)
    hidden = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    ref_hidden, g = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    ours = full_kl_of_hidden(hidden, head, ref_hidden, ref_head, temperature=0.7, chunk_size=chunk_size)
    want = plain(hidden, head, ref_hidden, ref_head, 0.7)
    torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-13)
    leaves = leaves_of(hidden, head)
    found, expected = (torch.autograd.grad(kl @ g, leaves) for kl in (ours, want))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk_size", [2, 7, 100])
def test_the_forward_kl_equals_the_plain_formula(kind, chunk_size):
    torch.manual_seed(0)
    head, ref_head = make_head(11, 4, **HEADS[kind]), make_head(11, 3, bias=True, scale=0.5)
    hidden = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    ref_hidden, g = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    ours = forward_kl_of_hidden(
        hidden, head, ref_hidden, ref_head, TopK(4, -3.0), temperature=0.7, chunk_size=chunk_size
    )
    logits = (logits_of(*pair) / 0.7 for pair in ((hidden, head), (ref_hidden, ref_head)))
    want = forward_kl_topk(*logits, topk=4, log_prob_min_clamp=-3.0)
    torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-13)
    leaves = leaves_of(hidden, head)
    found, expected = (torch.autograd.grad(kl @ g, leaves) for kl in (ours, want))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_gradcheck():
    torch.manual_seed(1)
    hidden, ref_hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.randn(4, 3).double()
    head, ref_head = make_head(6, 3, softcap=3.0), make_head(6, 3)

    def run(hidden, weight):
        return full_kl_of_hidden(hidden, LmHead(weight, softcap=3.0), ref_hidden, ref_head, chunk_size=4)

    assert torch.autograd.gradcheck(run, (hidden, head.weight))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(2, 40), st.integers(1, 45), st.integers(0, 2**16), st.floats(0.0, 300.0))
def test_chunking_is_invisible(tokens, vocab, chunk_size, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    hidden, ref_hidden = (torch.randn(tokens, 3, **draw) * spread for _ in range(2))  # large logits must not overflow
    head, ref_head = (LmHead(torch.randn(vocab, 3, **draw)) for _ in range(2))
    found = full_kl_of_hidden(hidden, head, ref_hidden, ref_head, chunk_size=chunk_size)
    torch.testing.assert_close(found, plain(hidden, head, ref_hidden, ref_head), rtol=1e-10, atol=1e-10)
    assert found.min() > -1e-10


def test_a_policy_that_is_its_reference_has_neither_kl_nor_gradient():
    torch.manual_seed(2)
    head, hidden = make_head(9, 3), torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    kl = full_kl_of_hidden(hidden, head, hidden, head, chunk_size=4)
    assert kl.abs().max() < 1e-13
    for gradient in torch.autograd.grad(kl.sum(), [hidden, head.weight]):
        assert gradient.abs().max() < 1e-13


def test_the_reference_is_a_constant():
    head, ref_head = make_head(9, 3), make_head(9, 3)
    ref_hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    full_kl_of_hidden(torch.randn(4, 3, dtype=torch.float64), head, ref_hidden, ref_head).sum().backward()
    assert head.weight.grad is not None
    assert ref_head.weight.grad is None
    assert ref_hidden.grad is None


def test_no_tokens():
    head = make_head(9, 3)
    nothing = torch.zeros(0, 3, dtype=torch.float64, requires_grad=True)
    kl = full_kl_of_hidden(nothing, head, nothing.detach(), make_head(9, 3))
    kl.sum().backward()
    assert kl.shape == (0,)
    assert torch.equal(head.weight.grad, torch.zeros_like(head.weight))


@pytest.mark.parametrize("ref_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_matmuls_and_float32_sums(ref_dtype):
    torch.manual_seed(3)
    exact = [make_head(300, 16, dtype=torch.float32), make_head(300, 16, dtype=torch.float32)]
    hidden, ref_hidden = torch.randn(20, 16).bfloat16(), torch.randn(20, 16).to(ref_dtype)
    weight = exact[0].weight.detach().bfloat16().requires_grad_()
    ref_head = LmHead(exact[1].weight.detach().to(ref_dtype))
    found = full_kl_of_hidden(hidden, LmHead(weight), ref_hidden, ref_head, chunk_size=64)
    want = plain(hidden.float(), exact[0], ref_hidden.float(), exact[1])
    assert found.dtype == torch.float32
    assert ((found - want) / want).abs().max() < 0.1
    (got,) = torch.autograd.grad(found.sum(), weight)
    (expected,) = torch.autograd.grad(want.sum(), exact[0].weight)
    assert (got.float() - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_no_tensor_of_tokens_times_vocabulary_forward_or_backward(softcap):
    tokens, vocab, size, chunk = 64, 1000, 8, 100
    head = LmHead(torch.randn(vocab, size, requires_grad=True), softcap=softcap)
    hidden = torch.randn(tokens, size, requires_grad=True)
    ref_head, ref_hidden = LmHead(torch.randn(vocab, size)), torch.randn(tokens, size)
    with LargestTensor() as seen:
        full_kl_of_hidden(hidden, head, ref_hidden, ref_head, chunk_size=chunk).sum().backward()
    assert seen.numel == max(tokens * chunk, vocab * size)  # a chunk, or the weight's gradient
