"""Where packed tokens stand in attention's batches, by hand; and gradients against PyTorch's own indexing."""

import torch

from tether.kernels.attention_spec import AttentionSpec
from tether.models.layers.attention import Packed
from tether.models.layers.packed_layout import Places, places_of, select_rows

CPU = torch.device("cpu")


def two_responses() -> Places:
    """Prompt 0 1 with responses 2 3 and 4, then a sequence 5 by itself."""
    return places_of((2, 2, 1, 1), (None, 0, 0, None), CPU)


def test_places_by_hand() -> None:
    places = two_responses()
    assert places.shapes == ((2, 4), (1, 1))
    assert places.token.tolist() == [0, 1, 2, 3, 0, 1, 4, 4, 5]
    assert places.first.tolist() == [0, 1, 2, 3, 6, 8]
    assert places.unread.nonzero().flatten().tolist() == [4, 5, 7]
    assert [(token.tolist(), place.tolist()) for token, place in places.repeats] == [([0, 1], [4, 5])]


def test_sequences_of_other_lengths_are_apart() -> None:
    places = places_of((4, 8, 6), None, CPU)
    assert places.shapes == ((2, 8), (1, 4))
    assert places.token[:8].tolist() == list(range(4, 12))
    assert places.token[8:16].tolist() == [12, 13, 14, 15, 16, 17, 17, 17]


def test_gradients_are_those_of_indexing() -> None:
    places = two_responses()
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 3, dtype=torch.float64)
    weight[7] = 0  # nothing flows back from padding
    (found,) = torch.autograd.grad((places.spread(x) * weight).sum(), x)
    (expected,) = torch.autograd.grad((x[places.token] * weight).sum(), x)
    torch.testing.assert_close(found, expected)

    y = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, dtype=torch.float64)
    (found,) = torch.autograd.grad((places.collect(y) * weight).sum(), y)
    (expected,) = torch.autograd.grad((y[places.first] * weight).sum(), y)
    assert found.equal(expected)


def test_gradients_of_many_repeats_add_up_in_float32() -> None:
    """In bfloat16 a sum of 1 and eight times 2**-9 would stay 1."""
    index = torch.zeros(9, dtype=torch.int64)
    grad = torch.tensor([1.0] + [2.0**-9] * 8, dtype=torch.bfloat16)[:, None]
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    (found,) = torch.autograd.grad(select_rows(x, index), x, grad)
    assert float(found) == 1 + 2.0**-6

    places = places_of((1, *[1] * 9), (None, *[0] * 9), CPU)
    x = torch.zeros(10, 1, dtype=torch.bfloat16, requires_grad=True)
    grads = torch.zeros(18, 1, dtype=torch.bfloat16)
    grads[0::2] = grad
    (found,) = torch.autograd.grad(places.spread(x), x, grads)
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
