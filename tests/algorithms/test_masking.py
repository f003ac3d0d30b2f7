import math

import pytest
import torch

from tether.algorithms import count_valid, masked_mean, masked_sum, masked_var, masked_whiten, select
from tether.algorithms.masking import clip

X = torch.tensor([[1.0, 2.0, math.nan], [6.0, 1e9, -1e9]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_numbers_by_hand() -> None:
    # valid: 1, 2, 6. mean 3; squared deviations 4 + 1 + 9 = 14, over 3 - 1: 7
    assert masked_sum(X, MASK) == 9
    assert masked_mean(X, MASK) == 3
    assert masked_var(X, MASK) == 7
    whitened = masked_whiten(X, MASK)
    torch.testing.assert_close(whitened, torch.tensor([[-2.0, -1.0, 0.0], [3.0, 0.0, 0.0]]) / math.sqrt(7))


def test_rows() -> None:
    assert masked_sum(X, MASK, dim=-1).tolist() == [3, 6]
    assert masked_mean(X, MASK, dim=-1).tolist() == [1.5, 6]
    assert masked_mean(X, torch.zeros_like(MASK), dim=-1).tolist() == [0, 0]


def test_no_and_one_valid_value_have_a_meaning() -> None:
    nothing, one = torch.zeros_like(MASK), torch.zeros_like(MASK)
    one[1, 0] = True
    for mask in (nothing, one):
        assert masked_var(X, mask) == 0
        assert masked_whiten(X, mask).tolist() == [[0] * 3] * 2
    assert masked_mean(X, nothing) == 0
    assert masked_mean(X, one) == 6


def test_variance_does_not_cancel() -> None:
    # 1e4 + {0, 1, 2}: variance 1. mean(x^2) - mean(x)^2 has an error of several units in float32 here.
    assert masked_var(torch.tensor([1e4, 1e4 + 1, 1e4 + 2]), torch.ones(3)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("value", [0.1, 0.95, 1e-3, 1e6])
def test_equal_values_whiten_to_exactly_zero(value: float) -> None:
    assert not masked_whiten(torch.full((7, 3), value), torch.ones(7, 3)).any()


def test_gradient_at_a_masked_nan_is_zero() -> None:
    x = X.clone().requires_grad_()
    (masked_mean(x, MASK) + masked_var(x, MASK)).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert not x.grad[~MASK].any()


def test_dtypes() -> None:
    assert select(X.bfloat16(), MASK).dtype == torch.float32
    assert select(X.double(), MASK).dtype == torch.float64
    assert torch.equal(select(X, MASK), select(X, MASK.float()))  # masks in any dtype


def test_count_valid() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 0]])
    assert count_valid(mask) == (3, 2)


def test_the_gradient_of_a_clip_is_one_at_its_bounds() -> None:
    """Versions of torch disagree about `torch.clamp` there: 1, 0.5 or 0."""
    values = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0, math.inf], requires_grad=True)
    limited = clip(values, -1.0, torch.tensor(1.0))
    limited.sum().backward()
    assert limited.tolist() == [-1.0, -1.0, 0.0, 1.0, 1.0, 1.0]
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert clip(torch.tensor([math.nan]), -1.0, 1.0).isnan().all()
