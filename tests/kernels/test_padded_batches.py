"""The slots of packed tokens in attention's batches, by hand; and gradients against PyTorch's own indexing."""

import torch

from tether.kernels.causal_attention import AttentionSpec, PaddedBatches, padded_batches, select_rows
from tether.text.models.layers import Packed

CPU = torch.device("cpu")


def two_responses() -> PaddedBatches:
    """Prompt 0 1 with responses 2 3 and 4, then a sequence 5 by itself."""
    return padded_batches((2, 2, 1, 1), (None, 0, 0, None), CPU)


def test_slots_by_hand() -> None:
    batches = two_responses()
    assert batches.shapes == ((2, 4), (1, 1))
    assert batches.token.tolist() == [0, 1, 2, 3, 0, 1, 4, 4, 5]
    assert batches.first.tolist() == [0, 1, 2, 3, 6, 8]
    assert batches.unread.nonzero().flatten().tolist() == [4, 5, 7]
    assert [(token.tolist(), slot.tolist()) for token, slot in batches.repeats] == [([0, 1], [4, 5])]


def test_sequences_of_other_lengths_are_apart() -> None:
    batches = padded_batches((4, 8, 6), None, CPU)
    assert batches.shapes == ((2, 8), (1, 4))
    assert batches.token[:8].tolist() == list(range(4, 12))
    assert batches.token[8:16].tolist() == [12, 13, 14, 15, 16, 17, 17, 17]


def test_gradients_are_those_of_indexing() -> None:
    batches = two_responses()
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 3, dtype=torch.float64)
    weight[7] = 0  # nothing flows back from padding
    (found,) = torch.autograd.grad((batches.spread(x) * weight).sum(), x)
    (expected,) = torch.autograd.grad((x[batches.token] * weight).sum(), x)
    torch.testing.assert_close(found, expected)

    y = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, dtype=torch.float64)
    (found,) = torch.autograd.grad((batches.collect(y) * weight).sum(), y)
    (expected,) = torch.autograd.grad((y[batches.first] * weight).sum(), y)
    assert found.equal(expected)


def test_gradients_of_many_repeats_add_up_in_float32() -> None:
    """In bfloat16 a sum of 1 and eight times 2**-9 would stay 1."""
    index = torch.zeros(9, dtype=torch.int64)
    grad = torch.tensor([1.0] + [2.0**-9] * 8, dtype=torch.bfloat16)[:, None]
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    (found,) = torch.autograd.grad(select_rows(x, index), x, grad)
    assert float(found) == 1 + 2.0**-6

    batches = padded_batches((1, *[1] * 9), (None, *[0] * 9), CPU)
    x = torch.zeros(10, 1, dtype=torch.bfloat16, requires_grad=True)
    grads = torch.zeros(18, 1, dtype=torch.bfloat16)
    grads[0::2] = grad
    (found,) = torch.autograd.grad(batches.spread(x), x, grads)
    assert float(found[0]) == 1 + 2.0**-6


def test_a_shared_beginning_attends_as_if_it_were_repeated() -> None:
    torch.manual_seed(0)
    repeated = Packed((5, 4))
    shared = Packed((3, 2, 1), (None, 0, 0))
    tokens = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 5])  # of `shared`, in the order of `repeated`
    assert repeated.position_ids()[0].equal(shared.position_ids()[0, tokens])
    query = torch.randn(1, 4, 6, 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64)
    for window in (None, 2):
        spec = AttentionSpec(layer=0, scale=0.5, sliding_window=window)
        found = shared.attend(query, key, value, spec)[:, :, tokens]
        expected = repeated.attend(query[:, :, tokens], key[:, :, tokens], value[:, :, tokens], spec)
        torch.testing.assert_close(found, expected)
