"""Levels and weights: sums of columns, their transposes, and the weight that each aggregation gives an element."""

import pytest
import torch

from tether.algorithms import AGGREGATIONS, aggregate_loss, count_valid
from tether.control.learning.losses import loss_weights, mask_at, sum_to_level, to_columns

MASK = torch.tensor([[True, True], [True, False]])  # of 2 actions of 3 columns
COLUMNS = torch.arange(12.0).view(2, 6)
LEVELS = {"token_level": 6, "action_level": 2, "chunk_level": 1}


def test_sums_by_hand():
    assert sum_to_level(COLUMNS, "action_level", 2).tolist() == [[3.0, 12.0], [21.0, 30.0]]
    assert sum_to_level(COLUMNS, "action_level", 2, MASK).tolist() == [[3.0, 12.0], [21.0, 0.0]]
    assert sum_to_level(COLUMNS, "chunk_level", 2, MASK).tolist() == [[15.0], [21.0]]
    assert sum_to_level(COLUMNS, "token_level", 2, MASK)[1].tolist() == [6.0, 7.0, 8.0, 0.0, 0.0, 0.0]
    assert sum_to_level(COLUMNS, "action_level").tolist() == [[15.0], [51.0]]  # one action of six columns


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mask", [None, MASK])
def test_gradients_go_back_the_same_way(level, mask):
    columns = COLUMNS.clone().requires_grad_()
    grad = torch.randn(2, LEVELS[level], generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad(sum_to_level(columns, level, 2, mask), columns, grad)
    assert torch.equal(to_columns(grad, 6, mask).expand(2, 6), expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mask", [None, MASK])
def test_weights_are_the_derivatives_of_the_aggregation(mode, level, mask):
    loss = sum_to_level(COLUMNS, level, 2, mask).requires_grad_()
    counted = mask_at(level, mask, 6)
    full = torch.ones_like(loss, dtype=torch.bool) if counted is None else counted
    tokens, rows = count_valid(full)
    total = aggregate_loss(loss, full, mode, num_tokens=tokens, num_sequences=rows, max_length=5)
    (expected,) = torch.autograd.grad(total, loss)
    weights = loss_weights(mode, loss, counted, None, 5) * torch.ones_like(loss)
    torch.testing.assert_close(weights, expected)
