"""Values that ranks exchange: of a tensor its own numbers are sent, not the whole storage that it is a view of."""

import pickle

import pytest
import torch
from torch import Tensor

from tests.text.learning.batches import make_rollout
from tether.loop.rank_exchange import pickled

LARGE = torch.arange(100_000)
TENSORS = {
    "a row of many": LARGE.view(100, 1000)[7],
    "a column": LARGE.view(100, 1000)[:, 7],
    "one number": torch.tensor(2.5, dtype=torch.float64),
    "bfloat16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    "truth": torch.tensor([[True], [False]]),
    "nothing": torch.empty(0, 3, dtype=torch.int16),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_arrives_as_it_is(tensor: Tensor) -> None:
    (found,) = pickle.loads(pickled([tensor]))
    torch.testing.assert_close(found, tensor, rtol=0, atol=0, equal_nan=True)
    found += 1 if tensor.dtype != torch.bool else True  # it is the receiver's own
    assert len(pickled([tensor])) < 8 * tensor.numel() + 300


def test_a_gradient_is_still_asked_for() -> None:
    found = pickle.loads(pickled(torch.ones(2, requires_grad=True)))
    assert found.requires_grad


def test_tensors_in_a_batch_too() -> None:
    batch = make_rollout()
    row = pickled(batch[:1])
    assert len(row) < len(pickle.dumps(batch[:1])) / 2
    found = pickle.loads(row)
    assert type(found) is type(batch)
    assert found.response_ids.equal(batch.response_ids[:1])
