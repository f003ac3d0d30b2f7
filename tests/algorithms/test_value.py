import math

import pytest
import torch

from tether.algorithms import explained_variance, value_loss

NAN = math.nan
# Old values 0. Errors to the returns: .5 - 1; 2 - 3, clipped .5 - 3; 2 - 1, clipped .5 - 1.
VALUES = torch.tensor([[0.5, 2.0, 2.0, NAN]], dtype=torch.float64)
RETURNS = torch.tensor([[1.0, 3.0, 1.0, NAN]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0]])


def loss(**keywords: float | None) -> list[float]:
    return value_loss(VALUES, VALUES * 0, RETURNS, MASK, **keywords).loss[0].tolist()


def test_value_loss_by_hand() -> None:
    assert loss(cliprange_value=0.5) == [0.5 * 0.25, 0.5 * 6.25, 0.5 * 1, 0]
    assert loss(cliprange_value=None) == [0.5 * 0.25, 0.5 * 1, 0.5 * 1, 0]
    # delta 1: |2.5| -> 1 * (2.5 - .5)
    assert loss(cliprange_value=0.5, huber_delta=1.0) == [0.125, 2, 0.5, 0]


def test_a_clipped_value_has_no_gradient() -> None:
    values = VALUES.clone().requires_grad_()
    value_loss(values, VALUES * 0, RETURNS, MASK, cliprange_value=0.5).loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[-0.5, 0, 1, 0]]


def test_values_inside_the_clip_are_not_counted_as_clipped() -> None:
    """Not even by a rounding error: old + (new - old) is not new in floating point."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(50, 20, generator=generator)
    new = old + 0.1 * torch.rand(50, 20, generator=generator)
    result = value_loss(new, old, torch.zeros(50, 20), torch.ones(50, 20), cliprange_value=0.2)
    assert float(result.metrics["critic/vf_clipfrac"]) == 0


def test_metrics() -> None:
    metrics = value_loss(VALUES, VALUES * 0, RETURNS, MASK, cliprange_value=0.5).metrics
    assert {name: float(metric) for name, metric in metrics.items()} == pytest.approx(
        {"critic/vf_loss": (0.125 + 3.125 + 0.5) / 3, "critic/vf_clipfrac": 1 / 3, "critic/vpred_mean": 1.5}
    )


def test_explained_variance() -> None:
    # var(R) of 1, 3, 1: 4/3. Residuals .5, 1, -1: mean 1/6, var = (1/9 + 25/36 + 49/36) / 2 = 13/12.
    assert float(explained_variance(VALUES, RETURNS, MASK)) == pytest.approx(1 - 13 / 16)
    assert explained_variance(RETURNS, RETURNS, MASK) == 1
    assert explained_variance(RETURNS * 0 + 7, RETURNS, MASK) == pytest.approx(0)


def test_explained_variance_of_small_and_of_rounded_returns() -> None:
    mask = torch.ones(1, 3)
    small = torch.tensor([[0.0, 1e-4, 2e-4]])
    assert explained_variance(small, small, mask) == 1  # small rewards are not mistaken for constant ones
    assert explained_variance(small + 5, small, mask) == pytest.approx(1, abs=1e-4)  # a constant offset costs nothing
    rounded = torch.tensor([[0.1, 0.1 + 1e-8, 0.1]])
    assert explained_variance(small, rounded, mask) == 0


@pytest.mark.parametrize("mask", [[[1, 1, 1, 0]], [[1, 0, 0, 0]], [[0, 0, 0, 0]]])
def test_explained_variance_of_constant_returns_is_zero(mask: list) -> None:
    assert explained_variance(VALUES, RETURNS * 0 + 0.1, torch.tensor(mask)) == 0
